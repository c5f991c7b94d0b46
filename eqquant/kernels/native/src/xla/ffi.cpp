// The functions that XLA calls. They check their operands, choose the kernels of an
// instruction set, and run them on XLA's thread pool.
#include "xla/ffi/api/ffi.h"

#include <cstdint>
#include <string>

#include "products/kernels.h"
#include "xla/blocks_operands.h"
#include "xla/call.h"
#include "xla/names.h"
#include "xla/operands.h"
#include "xla/whole_products.h"

namespace eqquant {
namespace {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Bits = ffi::Buffer<ffi::U32>;
using Result = ffi::Result<ffi::Buffer<ffi::F32>>;

// What is wrong with the operands of a product from `from` to `to` columns, or "".
template <class Weights>
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

// Calls `one(product, i)` for each weight of the stack.
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
                   int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr) return no_kernel(set);
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
                      int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr) return no_kernel(set);
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
                    int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || kernels->bfloat16 == nullptr) return no_kernel(set);
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

// Whether blocks have whole fours of codes. Otherwise the last four of a block would
// reach into the digits of the next one.
bool has_whole_fours(const Weight& w) {
  return w.block >= w.bytes || w.block % bytes_of_fours(w.kind) == 0;
}

// Quantizes `x` to two digits.
ffi::Error integers(const ffi::ThreadPool& pool, Floats x, Operands o, Result y,
                    int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || kernels->integers == nullptr) return no_kernel(set);
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

// Takes `x` as one digit: `x[m, k] = unit[m, 1] * digit[m, k]`.
ffi::Error rounded(const ffi::ThreadPool& pool, ffi::Buffer<ffi::S8> x, Floats unit,
                   Operands o, Result y, int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || kernels->integers == nullptr) return no_kernel(set);
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

// `y[m, n] = x[m, k] @ w[n, k].T`, or `x[m, k] @ w[k, n]`, of integers.
ffi::Error bytes(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> x, ffi::Buffer<ffi::S8> w,
                 Result y, bool across, int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || kernels->bytes == nullptr) return no_kernel(set);
  const Matrices xs(x.dimensions()), ws(w.dimensions()), ys(y->dimensions());
  const int64_t k = across ? ws.rows : ws.columns, n = across ? ws.columns : ws.rows;
  if (xs.number != ws.number || ys.number != ws.number || xs.rows != ys.rows ||
      xs.columns != k || ys.columns != n)
    return wrong("matrices should have shapes that a product has");
  if (xs.each() == 0 || ws.each() == 0 || k >= 1 << 17)
    return wrong("matrices should not be empty, nor too long for sums of 32 bits");
  for (int64_t i = 0; i < ws.number; ++i)
    kernels->bytes({x.typed_data() + i * xs.each(), w.typed_data() + i * ws.each(),
                    y->typed_data() + i * ys.each(), xs.rows, n, k, across},
                   on(pool));
  return ffi::Error::Success();
}

// Which product of `Blocks` to compute.
enum class Decoding { kForward, kTransposed, kBfloat16, kIntegers, kFewIntegers };

inline bool has(const Kernels& kernels, Decoding kind) {
  switch (kind) {
    case Decoding::kForward: return kernels.decoded != nullptr;
    case Decoding::kTransposed: return kernels.decoded_transposed != nullptr;
    case Decoding::kBfloat16: return kernels.decoded_bfloat16 != nullptr;
    case Decoding::kIntegers: return kernels.decoded_integers != nullptr;
    case Decoding::kFewIntegers: return kernels.few_integers != nullptr;
  }
  return false;
}

// The same for the function of a name, below.
inline bool has(const Kernels& kernels, const std::string& function) {
  if (function == "forward") return kernels.forward != nullptr;
  if (function == "transposed") return kernels.transposed != nullptr;
  if (function == "integers") return kernels.integers != nullptr;
  if (function == "rounded") return kernels.integers != nullptr;
  if (function == "bfloat16") return kernels.bfloat16 != nullptr;
  if (function == "bytes") return kernels.bytes != nullptr;
  if (function == "decoded") return has(kernels, Decoding::kForward);
  if (function == "decoded_transposed") return has(kernels, Decoding::kTransposed);
  if (function == "decoded_bfloat16") return has(kernels, Decoding::kBfloat16);
  if (function == "decoded_integers") return has(kernels, Decoding::kIntegers);
  return function == "few_integers" && has(kernels, Decoding::kFewIntegers);
}

template <Decoding kind>
ffi::Error decoded(const ffi::ThreadPool& pool, Floats x, const BlocksOperands& o,
                   Result y, int32_t set, float unit) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || !has(*kernels, kind)) return no_kernel(set);
  const BlocksWeights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  const bool across = kind == Decoding::kTransposed;
  const int64_t from = across ? weights.n() : weights.k();
  const int64_t to = across ? weights.k() : weights.n();
  if (auto p = check(weights, xs, ys, from, to); !p.empty()) return wrong(p);
  if (kind == Decoding::kIntegers && o.point_type > 1 && o.point_type != 4)
    return wrong("products of integers are for points that are integers");
  if (kind == Decoding::kBfloat16 && o.packing == 0)
    return wrong("products of bfloat16 are for codes of whole bits");
  const Parallel parallel = on(pool);
  for (int64_t i = 0; i < weights.number(); ++i) {
    const Blocks w = weights[i];
    const float* const mine = x.typed_data() + i * xs.each();
    float* const found = y->typed_data() + i * ys.each();
    const BlocksProducts<Scratch> product(*kernels, w, parallel);
    if (kind == Decoding::kFewIntegers &&
        (xs.rows > kFewPartRows || !kernels->has_fours(w)))
      return wrong("products of three digits are for at most " +
                   std::to_string(kFewPartRows) +
                   " rows, and for integers of 8 bits, four of which are of one block");
    bool done = true;
    if constexpr (kind == Decoding::kForward)
      done = product.floats(mine, found, xs.rows);
    else if constexpr (kind == Decoding::kBfloat16)
      done = product.bfloat16(mine, found, xs.rows);
    else if constexpr (kind == Decoding::kIntegers)
      done = product.integers(mine, found, xs.rows, unit);
    else if constexpr (kind == Decoding::kFewIntegers)
      done = product.few_integers(mine, found, xs.rows, unit);
    else
      kernels->decoded_transposed(w, mine, found, xs.rows, parallel);
    if (!done) return no_memory();
  }
  return ffi::Error::Success();
}

// The signatures that XLA binds: all operands and attributes of a weight, one by one.
template <ffi::Error (*product)(const ffi::ThreadPool&, Floats, Operands, Result,
                                int32_t)>
ffi::Error of_floats(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer codes,
                     ffi::AnyBuffer scale, Bits factor, ffi::Buffer<ffi::U8> zero,
                     Floats points, Result y, int32_t kind, int64_t block,
                     int32_t scale_type, int32_t offset, int32_t used, int64_t k,
                     int32_t set) {
  return product(pool, x,
                 {codes, scale, factor, zero, points, kind, scale_type, offset, used,
                  block, k},
                 y, set);
}

ffi::Error of_rounded(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> x, Floats unit,
                      ffi::AnyBuffer codes, ffi::AnyBuffer scale, Bits factor,
                      ffi::Buffer<ffi::U8> zero, Floats points, Result y, int32_t kind,
                      int64_t block, int32_t scale_type, int32_t offset, int32_t used,
                      int64_t k, int32_t set) {
  return rounded(pool, x, unit,
                 {codes, scale, factor, zero, points, kind, scale_type, offset, used,
                  block, k},
                 y, set);
}

template <Decoding kind>
ffi::Error of_blocks(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer codes,
                     ffi::AnyBuffer scale, Bits factor, ffi::AnyBuffer offset,
                     Floats points, Result y, int32_t packing, int64_t block,
                     int32_t scale_type, int32_t offset_type, int32_t point_type,
                     int32_t base, int64_t k, bool in_panels, int32_t set,
                     float unit) {
  return decoded<kind>(pool, x,
                       {codes, scale, factor, offset, points, packing, scale_type,
                        offset_type, point_type, base, block, k, in_panels},
                       y, set, unit);
}

template <class Binding>
auto with_weight(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<Bits>()
      .template Arg<ffi::Buffer<ffi::U8>>()
      .template Arg<Floats>()
      .template Ret<ffi::Buffer<ffi::F32>>()
      .template Attr<int32_t>("kind")
      .template Attr<int64_t>("block")
      .template Attr<int32_t>("scale_type")
      .template Attr<int32_t>("offset")
      .template Attr<int32_t>("used")
      .template Attr<int64_t>("k")
      .template Attr<int32_t>("set");
}

auto bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

auto bind_floats() { return with_weight(bind().Arg<Floats>()); }

auto bind_blocks() {
  return bind()
      .Arg<Floats>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Bits>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Floats>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Attr<int32_t>("packing")
      .Attr<int64_t>("block")
      .Attr<int32_t>("scale_type")
      .Attr<int32_t>("offset_type")
      .Attr<int32_t>("point_type")
      .Attr<int32_t>("base")
      .Attr<int64_t>("k")
      .Attr<bool>("in_panels")
      .Attr<int32_t>("set")
      .Attr<float>("unit");
}

auto bind_rounded() {
  return with_weight(bind().Arg<ffi::Buffer<ffi::S8>>().Arg<Floats>());
}

auto bind_bytes() {
  return bind()
      .Arg<ffi::Buffer<ffi::S8>>()
      .Arg<ffi::Buffer<ffi::S8>>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Attr<bool>("across")
      .Attr<int32_t>("set");
}

}  // namespace
}  // namespace eqquant

// The version of XLA's FFI that the library was compiled for, and its instruction sets.
// Python reads them before it registers the functions below.
EQQUANT_EXPORT int32_t eqquant_interface_major() { return XLA_FFI_API_MAJOR; }
EQQUANT_EXPORT int32_t eqquant_interface_minor() { return XLA_FFI_API_MINOR; }

// The names of the features of set `i`, or null if there is none.
EQQUANT_EXPORT const char* eqquant_set(int32_t i) {
  const eqquant::Sets all = eqquant::sets();
  return i < all.number ? all.first[i].names : nullptr;
}
// Whether this machine has it.
EQQUANT_EXPORT int32_t eqquant_is_here(int32_t i) {
  return eqquant::set_here(i) != nullptr;
}
// Whether it has the kernels that the function of a name needs.
EQQUANT_EXPORT int32_t eqquant_has(int32_t i, const char* function) {
  const eqquant::Kernels* const kernels = eqquant::kernels_of(i);
  return kernels != nullptr && eqquant::has(*kernels, function);
}

EQQUANT_EXPORT int32_t eqquant_number(const char* name) {
  return eqquant::number_of(name);
}

// See `Kernels::has_fours`.
EQQUANT_EXPORT bool eqquant_has_fours(int32_t set, int32_t packing, int32_t point_type,
                                      int32_t offset, int64_t block, int64_t k,
                                      const float* points) {
  const eqquant::Kernels* kernels = eqquant::kernels_of(set);
  if (kernels == nullptr || kernels->has_fours == nullptr) return false;
  eqquant::Blocks w = {};
  w.packing = static_cast<eqquant::Packing>(packing);
  w.point_type = static_cast<eqquant::PointType>(point_type);
  w.offset = static_cast<eqquant::Offset>(offset);
  w.block = block;
  w.k = k;
  w.points = points;
  return kernels->has_fours(w);
}

EQQUANT_HANDLER(eqquant_forward, eqquant::of_floats<eqquant::forward>,
                eqquant::bind_floats());
EQQUANT_HANDLER(eqquant_transposed, eqquant::of_floats<eqquant::transposed>,
                eqquant::bind_floats());
EQQUANT_HANDLER(eqquant_bfloat16, eqquant::of_floats<eqquant::bfloat16>,
                eqquant::bind_floats());
EQQUANT_HANDLER(eqquant_integers, eqquant::of_floats<eqquant::integers>,
                eqquant::bind_floats());
EQQUANT_HANDLER(eqquant_decoded, eqquant::of_blocks<eqquant::Decoding::kForward>,
                eqquant::bind_blocks());
EQQUANT_HANDLER(eqquant_decoded_transposed, eqquant::of_blocks<eqquant::Decoding::kTransposed>,
                eqquant::bind_blocks());
EQQUANT_HANDLER(eqquant_decoded_bfloat16, eqquant::of_blocks<eqquant::Decoding::kBfloat16>,
                eqquant::bind_blocks());
EQQUANT_HANDLER(eqquant_decoded_integers, eqquant::of_blocks<eqquant::Decoding::kIntegers>,
                eqquant::bind_blocks());
EQQUANT_HANDLER(eqquant_few_integers, eqquant::of_blocks<eqquant::Decoding::kFewIntegers>,
                eqquant::bind_blocks());
EQQUANT_HANDLER(eqquant_rounded, eqquant::of_rounded, eqquant::bind_rounded());
EQQUANT_HANDLER(eqquant_bytes, eqquant::bytes, eqquant::bind_bytes());
