// Compares the kernels of each instruction set that this machine has with plain sums in
// double precision, on random weights in buffers of exactly their size:
//
//     check SEED CASES
//
// Tiles are emulated where there are none.
//
// Made to be compiled with sanitizers. These do not see what instructions with masks
// read, so some of the buffers end where a page begins that nothing may touch, and some
// begin where one ends.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "emulated_tiles.h"
#include "kernels.h"

namespace eqquant {
namespace {

std::mt19937_64 random_bits;

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

bool chance(double p) { return std::bernoulli_distribution(p)(random_bits); }

float normal() { return std::normal_distribution<float>()(random_bits); }

enum class Place { kHeap, kBeforeGuard, kAfterGuard };

// `size` numbers, of which no bit is clear at first: as floats they are NaN.
template <class T>
class Buffer {
 public:
  Buffer(int64_t size, Place place) : size_(static_cast<size_t>(size)) {
    const size_t bytes = size_ * sizeof(T);
    if (place == Place::kHeap) {
      heap_ = std::make_unique<T[]>(size_);
      data_ = heap_.get();
    } else {
      const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      const size_t inside = (bytes + page - 1) / page * page;
      mapped_ = inside + 2 * page;
      char* all = static_cast<char*>(
          mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      if (mprotect(all + page, inside, PROT_READ | PROT_WRITE) != 0) std::abort();
      start_ = all;
      all += place == Place::kAfterGuard ? page : page + inside - bytes;
      data_ = reinterpret_cast<T*>(all);
    }
    std::memset(static_cast<void*>(data_), 0xff, bytes);
  }
  Buffer(Buffer&& other) noexcept
      : size_(other.size_),
        mapped_(std::exchange(other.mapped_, 0)),
        start_(other.start_),
        heap_(std::move(other.heap_)),
        data_(other.data_) {}
  ~Buffer() {
    if (mapped_ != 0) munmap(start_, mapped_);
  }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  size_t size_, mapped_ = 0;
  char* start_ = nullptr;
  std::unique_ptr<T[]> heap_;
  T* data_;
};

// Threads that take tasks.
class Pool {
 public:
  explicit Pool(int64_t threads) {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { loop(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    ready_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  Parallel parallel() const {
    return {run, this, static_cast<int64_t>(threads_.size()) + 1};
  }

 private:
  static void run(const void* pool, int64_t tasks,
                  void (*task)(void* data, int64_t i, int64_t worker), void* data) {
    struct State {
      std::atomic<int64_t> next{0}, done{0}, workers{1};
    };
    auto state = std::make_shared<State>();
    auto work = [=](int64_t worker) {
      for (int64_t i; (i = state->next.fetch_add(1)) < tasks; ++state->done)
        task(data, i, worker);
    };
    auto* self = static_cast<Pool*>(const_cast<void*>(pool));
    const int64_t helpers = std::min<int64_t>(self->threads_.size(), tasks - 1);
    for (int64_t i = 0; i < helpers; ++i)
      self->schedule([=] { work(state->workers.fetch_add(1)); });
    work(0);
    while (state->done < tasks) std::this_thread::yield();
  }

  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ready_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> waiting_;
  std::vector<std::thread> threads_;
  bool ended_ = false;
};

int64_t base_of(Codes kind) {
  const int64_t bases[] = {256, 16, 4, 3, 2};
  return bases[static_cast<int>(kind)];
}

double bfloat16_to_double(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float found;
  std::memcpy(&found, &wide, 4);
  return found;
}

// To the nearest, and to even of two.
double rounded_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bfloat16_to_double(
      static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

// Of normal numbers.
double float16_to_double(uint16_t bits) {
  const double size = std::ldexp(1024 + (bits & 0x3ff), (bits >> 10 & 31) - 25);
  return bits >> 15 ? -size : size;
}

// What of a weight is rounded to bfloat16.
enum class Rounded { kNothing, kPoints, kNumbers };

// A random weight: as kernels take it, and the parts of its numbers in double
// precision.
class Case {
 public:
  Case(Codes kind, bool integers)
      : kind_(kind),
        per_(codes_per_byte(kind)),
        n_(some_n()),
        bytes_(chance(0.2) ? between(1, 1200) : between(1, 90)),
        block_(some_block(integers)),
        blocks_(divided_up(bytes_, block_)),
        rows_(chance(0.3) ? 1 : between(1, 40)),
        columns_(chance(0.2) ? 1 : n_),
        scale_type_(static_cast<ScaleType>(between(0, 2))),
        place_(static_cast<Place>(between(0, 2))),
        codes_(bytes_ * n_, place_),
        scale32_(blocks_ * columns_, place_),
        scale16_(blocks_ * columns_, place_),
        zero_(blocks_ * n_, place_),
        points_(16, place_),
        has_zero_(kind == Codes::kNibbles && chance(0.3)),
        offset_(kind == Codes::kInt8   ? 128
                : kind == Codes::kBits ? 1
                : has_zero_            ? 0
                                       : between(0, 9)) {
    const int64_t most = kind == Codes::kTrits ? 242 : 255;
    for (int64_t i = 0; i < bytes_ * n_; ++i)
      codes_[i] = static_cast<uint8_t>(between(0, most));
    for (int64_t i = 0; i < blocks_ * n_; ++i)
      zero_[i] = static_cast<uint8_t>(between(0, base_of(kind) - 1));
    // Nearly all numbers are zero, so that what is not is small beside the codes.
    if (has_zero_ && chance(0.5))
      for (int64_t i = 0; i < bytes_ * n_; ++i)
        if (chance(0.9))
          codes_[i] = static_cast<uint8_t>(17 * zero_[i / n_ / block_ * n_ + i % n_]);
    for (int64_t i = 0; i < 16; ++i)
      points_[i] = !integers              ? normal()
                   : kind == Codes::kBits ? static_cast<float>(2 * i - 1)
                                          : static_cast<float>(i - offset_);
    for (int64_t i = 0; i < blocks_ * columns_; ++i) {
      const float scale = std::exp(normal()) * (chance(0.1) ? -1 : 1);
      std::memcpy(&scale32_[i], &scale, 4);
      // The sign, some exponent near 1, any mantissa.
      const int64_t sign = between(0, 1) << 15;
      scale16_[i] =
          static_cast<uint16_t>(scale_type_ == ScaleType::kFloat16
                                    ? sign | between(10, 20) << 10 | between(0, 1023)
                                    : sign | between(120, 130) << 7 | between(0, 127));
    }
  }

  Weight weight() const {
    const bool wide = scale_type_ == ScaleType::kFloat32;
    return {kind_,
            codes_.data(),
            bytes_,
            n_,
            block_,
            blocks_,
            scale_type_,
            wide ? static_cast<const void*>(scale32_.data())
                 : static_cast<const void*>(scale16_.data()),
            columns_,
            has_zero_ ? zero_.data() : nullptr,
            points_.data(),
            static_cast<int32_t>(offset_)};
  }

  // The number `k` of the row `i`.
  double number(int64_t i, int64_t k, Rounded rounded) const {
    const double found = point(i, k, rounded == Rounded::kPoints) * scale(i, k);
    return rounded == Rounded::kNumbers ? rounded_to_bfloat16(static_cast<float>(found))
                                        : found;
  }

  template <class T>
  Buffer<T> buffer(int64_t size) const {
    return Buffer<T>(size, place_);
  }

  // Some rows are zero, and some have a number that is much larger than the others.
  Buffer<float> inputs(int64_t columns) const {
    auto x = buffer<float>(rows_ * columns);
    for (int64_t m = 0; m < rows_; ++m) {
      const bool zero = chance(0.1);
      for (int64_t i = 0; i < columns; ++i) x[m * columns + i] = zero ? 0 : normal();
      if (chance(0.2)) x[m * columns + between(0, columns - 1)] *= 100;
    }
    return x;
  }

  int64_t rows() const { return rows_; }
  int64_t n() const { return n_; }
  int64_t k() const { return per_ * bytes_; }
  bool for_bfloat16() const { return kind_ == Codes::kNibbles && !has_zero_; }

  void print() const {
    std::printf(
        "rows %ld, n %ld, bytes %ld, block %ld, kind %d, scales %ld of type %d, "
        "zero-points %d, place %d\n",
        rows_, n_, bytes_, block_, static_cast<int>(kind_), columns_,
        static_cast<int>(scale_type_), has_zero_, static_cast<int>(place_));
  }

 private:
  // What the code `k` of the row `i` stands for, not scaled.
  double point(int64_t i, int64_t k, bool narrow) const {
    const uint8_t byte = codes_[k / per_ * n_ + i];
    if (kind_ == Codes::kInt8) return static_cast<int8_t>(byte);
    int64_t digit = byte;
    for (int64_t j = 0; j < k % per_; ++j) digit /= base_of(kind_);
    const float found = points_[digit % base_of(kind_)];
    const double less = has_zero_ ? zero_[k / per_ / block_ * n_ + i] : 0;
    return (narrow ? rounded_to_bfloat16(found) : found) - less;
  }

  double scale(int64_t i, int64_t k) const {
    const int64_t at = k / per_ / block_ * columns_ + (columns_ == 1 ? 0 : i);
    if (scale_type_ == ScaleType::kFloat16) return float16_to_double(scale16_[at]);
    if (scale_type_ == ScaleType::kBfloat16) return bfloat16_to_double(scale16_[at]);
    float found;
    std::memcpy(&found, &scale32_[at], 4);
    return found;
  }

  static int64_t some_n() {
    if (chance(0.05)) return between(500, 3300);
    return chance(0.5) ? between(1, 40) : between(1, 200);
  }

  // Products of integers take whole fours of codes.
  int64_t some_block(bool integers) const {
    if (chance(0.3)) return bytes_;
    const int64_t found = between(1, chance(0.5) ? 8 : bytes_);
    const int64_t fours = bytes_of_fours(kind_);
    return integers ? divided_up(found, fours) * fours : found;
  }

  Codes kind_;
  int64_t per_, n_, bytes_, block_, blocks_, rows_, columns_;
  ScaleType scale_type_;
  Place place_;
  Buffer<uint8_t> codes_;
  Buffer<uint32_t> scale32_;
  Buffer<uint16_t> scale16_;
  Buffer<uint8_t> zero_;
  Buffer<float> points_;
  bool has_zero_;
  int64_t offset_;
};

using Numbers = std::vector<double>;

constexpr double bound = 1e-5;

int64_t failures = 0;

void fail(const Case& c, const char* set, const char* what) {
  if (++failures > 10) return;  // The others are like these.
  std::printf("%s, %s: ", set, what);
  c.print();
}

// Whether `y` is `x @ W.T`, or `x @ W` for some columns; for each number relative to
// the sum of absolute values.
bool right(const Case& c, bool transposed, int64_t columns, const Numbers& x,
           const float* y, Rounded rounded = Rounded::kNothing) {
  const int64_t summed = transposed ? c.n() : c.k();
  Numbers w(static_cast<size_t>(summed));
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < summed; ++j) {
      const int64_t n = transposed ? j : i, k = transposed ? i : j;
      w[static_cast<size_t>(j)] = c.number(n, k, rounded);
    }
    for (int64_t m = 0; m < c.rows(); ++m) {
      double sum = 0, size = 0;
      const double* mine = x.data() + m * summed;
      for (size_t j = 0; j < w.size(); ++j) {
        sum += mine[j] * w[j];
        size += std::abs(mine[j] * w[j]);
      }
      // Not so if one of them is no number.
      if (!(std::abs(y[m * columns + i] - sum) <= bound * size + 1e-30)) return false;
    }
  }
  return true;
}

template <class Run>
void check(const Case& c, const char* set, const char* what, const Pool& pool,
           const Buffer<float>& y, Run run,
           const std::function<bool(const float*)>& right) {
  run(pool.parallel());
  if (!right(y.data())) fail(c, set, what);
  // One thread finds the same bits.
  std::vector<float> before(y.data(), y.data() + y.size());
  std::memset(static_cast<void*>(y.data()), 0xff, y.size() * sizeof(float));
  const Pool alone(0);
  run(alone.parallel());
  if (std::memcmp(before.data(), y.data(), y.size() * sizeof(float)) != 0)
    fail(c, set, "not the same on one thread");
}

void check_forward(const Case& c, const Kernels& kernels, const char* set,
                   const Pool& pool) {
  const Weight w = c.weight();
  const auto x = c.inputs(c.k());
  const auto y = c.buffer<float>(c.rows() * c.n());
  const Numbers exact(x.data(), x.data() + x.size());
  check(
      c, set, "forward", pool, y,
      [&](const Parallel& parallel) {
        const auto scratch = c.buffer<float>(kernels.forward_scratch(w, c.rows()));
        kernels.forward(w, x.data(), y.data(), c.rows(), scratch.data(), parallel);
      },
      [&](const float* found) { return right(c, false, c.n(), exact, found); });
  if (kernels.bfloat16 == nullptr || !c.for_bfloat16()) return;
  Numbers narrow(x.size());
  std::transform(x.data(), x.data() + x.size(), narrow.begin(), rounded_to_bfloat16);
  check(
      c, set, "bfloat16", pool, y,
      [&](const Parallel& parallel) {
        const auto scratch =
            c.buffer<float>(kernels.bfloat16_scratch(w, c.rows(), parallel.workers));
        kernels.bfloat16(w, x.data(), y.data(), c.rows(), scratch.data(), parallel);
      },
      [&](const float* found) {
        return right(c, false, c.n(), narrow, found,
                     &kernels == &amx_kernels ? Rounded::kNumbers : Rounded::kPoints);
      });
}

void check_transposed(const Case& c, const Kernels& kernels, const char* set,
                      const Pool& pool) {
  const auto x = c.inputs(c.n());
  const int64_t k = larger(1, c.k() - (chance(0.5) ? between(0, 9) : 0));
  const auto y = c.buffer<float>(c.rows() * k);
  const Numbers exact(x.data(), x.data() + x.size());
  check(
      c, set, "transposed", pool, y,
      [&](const Parallel& parallel) {
        kernels.transposed(c.weight(), x.data(), y.data(), c.rows(), k, parallel);
      },
      [&](const float* found) { return right(c, true, k, exact, found); });
}

// Of `x` in two digits, which should be close to it, and in the first of them.
void check_integers(const Case& c, const Kernels& kernels, const char* set,
                    const Pool& pool) {
  if (kernels.integers == nullptr) return;
  const Weight w = c.weight();
  const auto x = c.inputs(c.k());
  const auto y = c.buffer<float>(c.rows() * c.n());
  const int64_t stride = codes_of(w.kind, w.bytes);
  const auto digit = c.buffer<int8_t>(2 * c.rows() * stride);
  const auto unit = c.buffer<float>(c.rows());
  Digits digits = {2, c.rows(), stride, digit.data(), unit.data()};
  kernels.to_digits(x.data(), c.rows(), c.k(), digits, digit.data(), unit.data(),
                    pool.parallel());
  Numbers one, two;
  for (int64_t m = 0; m < c.rows(); ++m)
    for (int64_t i = 0; i < c.k(); ++i) {
      const int64_t at = m * stride + i;
      const double second = double{unit[m]} / 254;
      one.push_back(double{unit[m]} * digit[at]);
      two.push_back(one.back() + second * digit[c.rows() * stride + at]);
      const double less = x[m * c.k() + i] - two.back();
      if (!(std::abs(less) <= 0.51 * second)) return fail(c, set, "digits");
    }
  const auto first = c.buffer<int8_t>(c.rows() * stride);
  std::memcpy(first.data(), digit.data(), first.size());
  const Digits rounded = {1, c.rows(), stride, first.data(), unit.data()};
  for (const Digits* some : {static_cast<const Digits*>(&digits), &rounded}) {
    check(
        c, set, some->number == 2 ? "integers" : "rounded", pool, y,
        [&](const Parallel& parallel) {
          const auto scratch =
              c.buffer<float>(kernels.integers_scratch(w, *some, parallel.workers));
          kernels.integers(w, *some, y.data(), scratch.data(), parallel);
        },
        [&](const float* found) {
          return right(c, false, c.n(), some->number == 2 ? two : one, found);
        });
    if (&kernels != &amx_kernels) continue;
    const auto same = c.buffer<float>(c.rows() * c.n());
    const Parallel parallel = pool.parallel();
    const auto scratch =
        c.buffer<float>(avx512_kernels.integers_scratch(w, *some, parallel.workers));
    avx512_kernels.integers(w, *some, same.data(), scratch.data(), parallel);
    if (std::memcmp(same.data(), y.data(), y.size() * sizeof(float)) != 0)
      fail(c, set, "not the same bits as in registers");
  }
}

void check_case(const Kernels& kernels, const char* set, const Pool& pool) {
  const Codes kind = static_cast<Codes>(between(0, 4));
  const Case any(kind, false), whole(kind, true);
  check_forward(any, kernels, set, pool);
  check_transposed(any, kernels, set, pool);
  check_integers(whole, kernels, set, pool);
}

}  // namespace
}  // namespace eqquant

int main(int, char** argument) {
  using namespace eqquant;
  const uint64_t seed = std::strtoull(argument[1], nullptr, 10);
  const int64_t cases = std::strtoll(argument[2], nullptr, 10);
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const bool tiles = bf16 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  if (!tiles) emulated::install();
  const struct {
    bool runs;
    const Kernels& kernels;
    const char* name;
  } sets[] = {{avx2, avx2_kernels, "AVX2"},
              {avx512, avx512_kernels, "AVX512"},
              {bf16, avx512_bf16_kernels, "AVX512-BF16"},
              {bf16, amx_kernels, tiles ? "AMX" : "AMX, emulated"}};
  // How much lies together depends on the number of threads, too.
  const Pool pools[] = {Pool(3), Pool(0)};
  for (const auto& set : sets) {
    random_bits.seed(seed);
    if (set.runs)
      for (int64_t i = 0; i < cases; ++i)
        check_case(set.kernels, set.name, pools[i % 2]);
    std::printf("%s: %s\n", set.name, set.runs ? "done" : "not on this machine");
  }
  std::printf("%ld wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
