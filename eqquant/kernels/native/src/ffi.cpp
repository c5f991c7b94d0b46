// What XLA calls: checks of the operands, and threads of its own pool.
#include "xla/ffi/api/ffi.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "kernels.h"
#include "products.h"

namespace eqquant {
namespace {

namespace ffi = xla::ffi;

// The instruction sets, each of which has all those before it.
enum Level : int32_t { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// Whether there are tiles, with products of 8-bit integers and of bfloat16, and Linux
// lets this process have them: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA.
bool may_use_tiles() {
  constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;
  unsigned a, b, c, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & wanted) == wanted &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

Level find_level() {
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  __builtin_cpu_init();
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return kNone;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vnni"))
    return kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return kAvx512;
  return may_use_tiles() ? kAmx : kAvx512Bf16;
}

// Asked for once, since Linux may come to another answer.
Level level_of_machine() {
  static const Level found = find_level();
  return found;
}

const Kernels* kernels_of(int32_t level) {
  if (level > level_of_machine()) return nullptr;
  switch (level) {
    case kAvx2: return &avx2_kernels;
    case kAvx512: return &avx512_kernels;
    case kAvx512Bf16: return &avx512_bf16_kernels;
    case kAmx: return &amx_kernels;
    default: return nullptr;
  }
}

// Runs tasks on the pool and on the thread that asks for them, whichever is first.
void run_on_pool(const void* pool, int64_t tasks,
                 void (*task)(void* data, int64_t i, int64_t worker), void* data) {
  auto& threads =
      *const_cast<ffi::ThreadPool*>(static_cast<const ffi::ThreadPool*>(pool));
  struct State {
    std::atomic<int64_t> next{0}, done{0}, workers{1};
  };
  // Shared, for a thread may come to it when all is done.
  auto state = std::make_shared<State>();
  auto work = [state, tasks, task, data](int64_t worker) {
    for (int64_t i; (i = state->next.fetch_add(1)) < tasks;) {
      task(data, i, worker);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = smaller(threads.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i)
    threads.Schedule([state, work] { work(state->workers.fetch_add(1)); });
  work(0);
  for (int64_t spins = 0; state->done.load(std::memory_order_acquire) < tasks; ++spins)
    spins < 4096 ? _mm_pause() : std::this_thread::yield();
}

ffi::Error wrong(const std::string& what) {
  return ffi::Error::InvalidArgument("eqquant: " + what);
}

// The last two axes of an operand, and how many such matrices there are.
struct Matrices {
  int64_t number = 1, rows = 1, columns = 1;

  explicit Matrices(ffi::Span<const int64_t> sizes) {
    const int64_t rank = static_cast<int64_t>(sizes.size());
    for (int64_t i = 0; i < rank; ++i)
      (i + 2 < rank ? number : i + 2 == rank ? rows : columns) *= sizes[i];
  }
  int64_t each() const { return rows * columns; }
};

// The operands and attributes that say what a weight is.
struct Operands {
  ffi::AnyBuffer codes, scale;
  ffi::Buffer<ffi::U8> zero;
  ffi::Buffer<ffi::F32> points;
  int32_t kind, scale_type, offset, used;
  int64_t block, k;
};

// The weights of a product, side by side.
class Weights {
 public:
  explicit Weights(const Operands& o)
      : o_(o),
        codes_(o.codes.dimensions()),
        scale_(o.scale.dimensions()),
        zero_(o.zero.dimensions()),
        points_(o.points.dimensions()) {}

  int64_t number() const { return codes_.number; }
  int64_t n() const { return codes_.columns; }
  int64_t k() const { return codes_.rows * codes_per_byte(kind()); }
  int64_t k_in_fours() const { return codes_of(kind(), codes_.rows); }

  std::string problem() const {
    if (o_.kind < 0 || o_.kind > static_cast<int32_t>(Codes::kBits))
      return "unknown kind of codes " + std::to_string(o_.kind);
    const auto wanted = o_.kind == 0 ? ffi::S8 : ffi::U8;
    if (o_.codes.element_type() != wanted || o_.codes.dimensions().size() < 2)
      return "codes should be a matrix of bytes, signed if each is one code";
    if (codes_.rows < 1 || codes_.columns < 1 || o_.block < 1)
      return "codes and blocks should not be empty";
    const int64_t blocks = divided_up(codes_.rows, block());
    const bool wide = o_.scale_type == static_cast<int32_t>(ScaleType::kFloat32);
    if (o_.scale_type < 0 || o_.scale_type > 2 ||
        o_.scale.element_type() != (wide ? ffi::U32 : ffi::U16))
      return "scales should be the bits of floats of 32 bits, or of 16";
    if (scale_.rows != blocks || (scale_.columns != n() && scale_.columns != 1))
      return "there should be scales for " + std::to_string(blocks) +
             " blocks of each row or of all, got " + std::to_string(scale_.rows) +
             " x " + std::to_string(scale_.columns);
    if (zero_.each() != 0 && (zero_.rows != blocks || zero_.columns != n()))
      return "there should be zero-points for " + std::to_string(blocks) +
             " blocks of each row, got " + std::to_string(zero_.rows) + " x " +
             std::to_string(zero_.columns);
    if (zero_.each() != 0 && kind() != Codes::kNibbles)
      return "zero-points are for nibbles";
    if (o_.offset < -255 || o_.offset > 255)
      return "the offset should have 8 bits, got " + std::to_string(o_.offset);
    if (points_.each() != 16) return "there should be 16 points";
    if (o_.used < 1 || o_.used > codes_per_byte(kind()) || o_.k < 1 ||
        o_.k > codes_.rows * o_.used)
      return "bytes should have room for codes, got " + std::to_string(o_.used) +
             " in each and " + std::to_string(o_.k) + " in all";
    for (int64_t number : {scale_.number, zero_.number, points_.number})
      if (number != codes_.number)
        return "there should be as many weights in each operand, got " +
               std::to_string(number) + " and " + std::to_string(codes_.number);
    return "";
  }

  Weight operator[](int64_t i) const {
    const int64_t scale_size = o_.scale_type == 0 ? 4 : 2;
    return {
        kind(),
        static_cast<const uint8_t*>(o_.codes.untyped_data()) + i * codes_.each(),
        codes_.rows,
        n(),
        block(),
        scale_.rows,
        static_cast<ScaleType>(o_.scale_type),
        static_cast<const uint8_t*>(o_.scale.untyped_data()) +
            i * scale_.each() * scale_size,
        scale_.columns,
        zero_.each() == 0 ? nullptr : o_.zero.typed_data() + i * zero_.each(),
        o_.points.typed_data() + i * points_.each(),
        o_.offset,
        o_.used,
        o_.k,
    };
  }

 private:
  Codes kind() const { return static_cast<Codes>(o_.kind); }
  // No longer than a row.
  int64_t block() const { return smaller(o_.block, codes_.rows); }

  const Operands& o_;
  Matrices codes_, scale_, zero_, points_;
};

// Memory for the time of a call. (XLA has an allocator for devices only.)
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t number)
      : data_(number == 0 ? nullptr
                          : ::operator new(static_cast<size_t>(number) * sizeof(T),
                                           std::align_val_t(64), std::nothrow)),
        failed_(number != 0 && data_ == nullptr) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  bool failed() const { return failed_; }

 private:
  void* data_;
  bool failed_;
};

Parallel on(const ffi::ThreadPool& pool) {
  return {run_on_pool, &pool, larger(1, pool.num_threads())};
}

using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::Result<ffi::Buffer<ffi::F32>>;

std::string check(const Weights& w, const Matrices& x, const Matrices& y, int64_t from,
                  int64_t to) {
  std::string problem = w.problem();
  if (!problem.empty()) return problem;
  if (x.number != w.number() || y.number != w.number() || x.rows != y.rows)
    return "inputs and results should have as many rows, and as many weights";
  if (x.columns != from || y.columns != to)
    return "inputs should have " + std::to_string(from) + " columns and results " +
           std::to_string(to) + ", got " + std::to_string(x.columns) + " and " +
           std::to_string(y.columns);
  return "";
}

ffi::Error no_level(int32_t level) {
  return wrong("this machine has no instructions of level " + std::to_string(level));
}

ffi::Error no_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "eqquant: no scratch memory");
}

// Calls `one(product, i)` for each of the weights.
template <class One>
ffi::Error multiply(const Kernels& kernels, const Weights& weights, int64_t rows,
                    const ffi::ThreadPool& pool, One one) {
  for (int64_t i = 0; i < weights.number(); ++i) {
    const Weight w = weights[i];
    if (!one(Products<Scratch>(kernels, w, rows, on(pool)), i)) return no_memory();
  }
  return ffi::Error::Success();
}

ffi::Error forward(const ffi::ThreadPool& pool, Floats x, Operands o, Result y,
                   int32_t level) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr) return no_level(level);
  const Weights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  if (auto p = check(weights, xs, ys, weights.k(), weights.n()); !p.empty())
    return wrong(p);
  return multiply(*kernels, weights, xs.rows, pool,
                  [&](const auto& product, int64_t i) {
                    return product.forward(x.typed_data() + i * xs.each(),
                                           y->typed_data() + i * ys.each());
                  });
}

ffi::Error transposed(const ffi::ThreadPool& pool, Floats x, Operands o, Result y,
                      int32_t level) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr) return no_level(level);
  const Weights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  const int64_t k = smaller(ys.columns, weights.k());
  if (auto p = check(weights, xs, ys, weights.n(), k); !p.empty()) return wrong(p);
  return multiply(*kernels, weights, xs.rows, pool,
                  [&](const auto& product, int64_t i) {
                    return product.transposed(x.typed_data() + i * xs.each(),
                                              y->typed_data() + i * ys.each(), k);
                  });
}

ffi::Error bfloat16(const ffi::ThreadPool& pool, Floats x, Operands o, Result y,
                    int32_t level) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || kernels->bfloat16 == nullptr) return no_level(level);
  const Weights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  if (auto p = check(weights, xs, ys, weights.k(), weights.n()); !p.empty())
    return wrong(p);
  if (weights[0].kind != Codes::kNibbles || weights[0].zero != nullptr)
    return wrong("products of bfloat16 are for nibbles without zero-points");
  return multiply(*kernels, weights, xs.rows, pool,
                  [&](const auto& product, int64_t i) {
                    return product.bfloat16(x.typed_data() + i * xs.each(),
                                            y->typed_data() + i * ys.each());
                  });
}

// Or else the last four of a block would reach into the digits of the next one.
bool has_whole_fours(const Weight& w) {
  return w.block >= w.bytes || w.block % bytes_of_fours(w.kind) == 0;
}

// Of `x` in two digits.
ffi::Error integers(const ffi::ThreadPool& pool, Floats x, Operands o, Result y,
                    int32_t level) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || kernels->integers == nullptr) return no_level(level);
  const Weights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  if (auto p = check(weights, xs, ys, weights.k(), weights.n()); !p.empty())
    return wrong(p);
  if (!has_whole_fours(weights[0])) return wrong("blocks should be of whole fours");
  return multiply(*kernels, weights, xs.rows, pool,
                  [&](const auto& product, int64_t i) {
                    return product.integers(x.typed_data() + i * xs.each(),
                                            y->typed_data() + i * ys.each());
                  });
}

// Of `x` in one digit, already rounded, `x[m, k] = unit[m, 1] * digit[m, k]`.
ffi::Error rounded(const ffi::ThreadPool& pool, ffi::Buffer<ffi::S8> x, Floats unit,
                   Operands o, Result y, int32_t level) {
  const Kernels* kernels = kernels_of(level);
  if (kernels == nullptr || kernels->integers == nullptr) return no_level(level);
  const Weights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions()), units(unit.dimensions());
  if (auto p = check(weights, xs, ys, weights.k_in_fours(), weights.n()); !p.empty())
    return wrong(p);
  if (units.number != xs.number || units.rows != xs.rows || units.columns != 1)
    return wrong("there should be a unit for each row");
  if (!has_whole_fours(weights[0])) return wrong("blocks should be of whole fours");
  return multiply(*kernels, weights, xs.rows, pool,
                  [&](const auto& product, int64_t i) {
                    return product.rounded(x.typed_data() + i * xs.each(),
                                           unit.typed_data() + i * xs.rows,
                                           y->typed_data() + i * ys.each());
                  });
}

template <ffi::Error (*product)(const ffi::ThreadPool&, Floats, Operands, Result,
                                int32_t)>
ffi::Error of_floats(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer codes,
                     ffi::AnyBuffer scale, ffi::Buffer<ffi::U8> zero, Floats points,
                     Result y, int32_t kind, int64_t block, int32_t scale_type,
                     int32_t offset, int32_t used, int64_t k, int32_t level) {
  return product(pool, x,
                 {codes, scale, zero, points, kind, scale_type, offset, used, block, k},
                 y, level);
}

ffi::Error of_rounded(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> x, Floats unit,
                      ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                      ffi::Buffer<ffi::U8> zero, Floats points, Result y, int32_t kind,
                      int64_t block, int32_t scale_type, int32_t offset, int32_t used,
                      int64_t k, int32_t level) {
  return rounded(pool, x, unit,
                 {codes, scale, zero, points, kind, scale_type, offset, used, block, k},
                 y, level);
}

template <class Binding>
auto with_weight(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::Buffer<ffi::U8>>()
      .template Arg<Floats>()
      .template Ret<ffi::Buffer<ffi::F32>>()
      .template Attr<int32_t>("kind")
      .template Attr<int64_t>("block")
      .template Attr<int32_t>("scale_type")
      .template Attr<int32_t>("offset")
      .template Attr<int32_t>("used")
      .template Attr<int64_t>("k")
      .template Attr<int32_t>("level");
}

auto bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

auto bind_floats() { return with_weight(bind().Arg<Floats>()); }

auto bind_rounded() {
  return with_weight(bind().Arg<ffi::Buffer<ffi::S8>>().Arg<Floats>());
}

}  // namespace
}  // namespace eqquant

#define EQQUANT_EXPORT extern "C" __attribute__((visibility("default")))

// The version of the interface that this was compiled for, and the instructions that
// the machine has.
EQQUANT_EXPORT int32_t eqquant_interface_major() { return XLA_FFI_API_MAJOR; }
EQQUANT_EXPORT int32_t eqquant_interface_minor() { return XLA_FFI_API_MINOR; }
EQQUANT_EXPORT int32_t eqquant_level() { return eqquant::level_of_machine(); }

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_forward, eqquant::of_floats<eqquant::forward>,
                              eqquant::bind_floats());
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_transposed,
                              eqquant::of_floats<eqquant::transposed>,
                              eqquant::bind_floats());
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_bfloat16, eqquant::of_floats<eqquant::bfloat16>,
                              eqquant::bind_floats());
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_integers, eqquant::of_floats<eqquant::integers>,
                              eqquant::bind_floats());
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_rounded, eqquant::of_rounded,
                              eqquant::bind_rounded());
#pragma GCC visibility pop
