// Compares the kernels of each instruction set that this machine has with plain sums in
// double precision, on random weights in buffers of exactly their size:
//
//     check SEED CASES
//
// Many of the numbers are not what one would like: infinite, not a number, huge, tiny.
//
// Tiles are emulated where there are none.
//
// Made to be compiled with sanitizers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "case.h"
#include "check_blocks.h"
#include "check_bytes.h"
#include "check_encode.h"
#include "check_trellis.h"
#include "compare.h"
#include "isa/here.h"
#include "products/kernels.h"
#include "pool.h"
#include "xla/whole_products.h"

#if defined(__x86_64__) && defined(__linux__)
#define EQQUANT_EMULATES_TILES
#include "emulated_tiles.h"
#endif

namespace eqquant {
namespace {

using Numbers = std::vector<double>;

// Whether these are the kernels with tiles.
bool has_tiles([[maybe_unused]] const Kernels& kernels) {
#ifdef EQQUANT_EMULATES_TILES
  return &kernels == &table_of(kAmx);
#else
  return false;
#endif
}

void fail(const Case& c, const char* set, const char* what) {
  report(set, what, [&] { c.print(); });
}

// Inputs, and what a weight is rounded to before they are multiplied with it.
struct Given {
  Numbers x;
  Rounded rounded;
};

// Whether `y` is `x @ W.T`, or `x @ W` for some columns, of any of what is given.
bool right(const Case& c, bool transposed, int64_t columns,
           const std::vector<Given>& given, const float* y, double unit = 0) {
  const int64_t summed = transposed ? c.n() : c.k();
  for (int64_t i = 0; i < columns; ++i) {
    if (transposed && !c.is_code(i)) continue;
    std::vector<Numbers> w;
    for (const Given& some : given) {
      w.emplace_back();
      for (int64_t j = 0; j < summed; ++j)
        w.back().push_back(
            c.number(transposed ? j : i, transposed ? i : j, some.rounded));
    }
    for (int64_t m = 0; m < c.rows(); ++m) {
      bool found = false;
      for (size_t g = 0; g < given.size() && !found; ++g)
        found = close(y[m * columns + i], given[g].x.data() + m * summed, w[g], unit);
      if (!found) return false;
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

Products<Guarded> products(const Case& c, const Kernels& kernels, const Weight& w,
                           const Parallel& parallel) {
  return Products<Guarded>(kernels, w, c.rows(), parallel);
}

void check_forward(const Case& c, const Kernels& kernels, const char* set,
                   const Pool& pool) {
  const Weight w = c.weight();
  const auto x = c.inputs_of_codes();
  const auto y = c.buffer<float>(c.rows() * c.n());
  const Given exact = {{x.data(), x.data() + x.size()}, Rounded::kNothing};
  check(
      c, set, "forward", pool, y,
      [&](const Parallel& parallel) {
        products(c, kernels, w, parallel).forward(x.data(), y.data());
      },
      [&](const float* found) { return right(c, false, c.n(), {exact}, found); });
  if (kernels.bfloat16 == nullptr || !c.for_bfloat16()) return;
  Given narrow = {Numbers(x.size()),
                  has_tiles(kernels) ? Rounded::kNumbers : Rounded::kPoints};
  std::transform(x.data(), x.data() + x.size(), narrow.x.begin(), rounded_to_bfloat16);
  check(
      c, set, "bfloat16", pool, y,
      [&](const Parallel& parallel) {
        products(c, kernels, w, parallel).bfloat16(x.data(), y.data());
      },
      [&](const float* found) {
        // (Sums of so many terms are not as exact as those of floats.)
        const double unit = c.is_long() ? 1e-3 : 0;
        return right(c, false, c.n(), {narrow, exact}, found, unit);
      });
}

void check_transposed(const Case& c, const Kernels& kernels, const char* set,
                      const Pool& pool) {
  const Weight w = c.weight();
  const auto x = c.inputs(c.n());
  const int64_t k = larger(1, c.k() - (chance(0.5) ? between(0, 9) : 0));
  const auto y = c.buffer<float>(c.rows() * k);
  const Given exact = {{x.data(), x.data() + x.size()}, Rounded::kNothing};
  check(
      c, set, "transposed", pool, y,
      [&](const Parallel& parallel) {
        products(c, kernels, w, parallel).transposed(x.data(), y.data(), k);
      },
      [&](const float* found) { return right(c, true, k, {exact}, found); });
}

// What two digits and outliers make of a row `x`, or nothing if that is not close to
// it.
Numbers from_digits(const Digits& digits, int64_t m, const float* x, int64_t k) {
  Numbers found;
  const double unit = digits.unit[m], mean = mean_size(x, k);
  if (mean != 0 && unit * 127 > 64 * mean) return found;
  const Outlier* outlier = digits.outlier + m * digits.most;
  const Outlier* const last = outlier + digits.outliers[m];
  for (int64_t i = 0; i < k; ++i) {
    const int64_t at = m * digits.stride + i;
    const double second = digits.digit[digits.rows * digits.stride + at] / 254.0;
    found.push_back(unit * (digits.digit[at] + second));
    if (outlier < last && outlier->k == i) {
      const float same = outlier->x * digits.unit[m];
      const bool close = std::isfinite(same)
                             ? std::abs(same - x[i]) <= 1e-6 * std::abs(x[i])
                             : !(std::abs(x[i]) < 1e20 * unit);
      if (found.back() != 0 || !close) return {};
      found.back() = x[i];
      ++outlier;
    } else if (!(std::abs(x[i] - found.back()) <= 0.51 * unit / 254 + 1e-38)) {
      return {};
    }
  }
  return found;
}

// Of `x` in two digits, which should be close to it.
void check_integers(const Case& c, const Kernels& kernels, const char* set,
                    const Pool& pool) {
  if (kernels.integers == nullptr) return;
  const Weight w = c.weight();
  const auto x = c.inputs_of_codes();
  const auto y = c.buffer<float>(c.rows() * c.n());
  const int64_t stride = codes_of(w.kind, w.bytes), most = c.k() / kOutlierShare;
  const auto digit = c.buffer<int8_t>(2 * c.rows() * stride);
  const auto unit = c.buffer<float>(c.rows());
  const auto outliers = c.buffer<int32_t>(c.rows());
  const auto outlier = c.buffer<Outlier>(c.rows() * most);
  const Digits digits = {2,           c.rows(), stride,          digit.data(),
                         unit.data(), most,     outliers.data(), outlier.data()};
  kernels.to_digits(x.data(), c.k(), digits, digit.data(), unit.data(), outliers.data(),
                    outlier.data(), pool.parallel());
  const Given exact = {{x.data(), x.data() + x.size()}, Rounded::kNothing};
  Given two = {{}, Rounded::kNothing};
  bool ordinary = true;
  for (int64_t m = 0; m < c.rows(); ++m) {
    const float* const mine = x.data() + m * c.k();
    ordinary = ordinary && outliers[m] <= 0;
    const Numbers row = outliers[m] == kNoDigits ? Numbers(mine, mine + c.k())
                                                 : from_digits(digits, m, mine, c.k());
    if (row.empty()) return fail(c, set, "digits");
    two.x.insert(two.x.end(), row.begin(), row.end());
  }
  check(
      c, set, "integers", pool, y,
      [&](const Parallel& parallel) {
        products(c, kernels, w, parallel).integers(x.data(), y.data());
      },
      [&](const float* found) { return right(c, false, c.n(), {two, exact}, found); });
  // (Squares of tiles scale sums over whole rows, once.)
  const bool squares = w.blocks == 1 && digits.number * c.rows() >= 64;
  if (!has_tiles(kernels) || !ordinary || squares) return;
  const auto same = c.buffer<float>(c.rows() * c.n());
  products(c, table_of(kAvx512), w, pool.parallel()).integers(x.data(), same.data());
  if (std::memcmp(same.data(), y.data(), y.size() * sizeof(float)) != 0)
    fail(c, set, "not the same bits as in registers");
}

// Of `x` in one digit.
void check_rounded(const Case& c, const Kernels& kernels, const char* set,
                   const Pool& pool) {
  if (kernels.integers == nullptr) return;
  const Weight w = c.weight();
  const auto y = c.buffer<float>(c.rows() * c.n());
  const int64_t stride = codes_of(w.kind, w.bytes);
  const auto digit = c.buffer<int8_t>(c.rows() * stride);
  const auto unit = c.buffer<float>(c.rows());
  Given given = {{}, Rounded::kNothing};
  for (int64_t m = 0; m < c.rows(); ++m) {
    unit[m] = chance(0.1) ? strange() : std::exp(normal());
    for (int64_t i = 0; i < stride; ++i) {
      const bool code = i < c.k() && c.is_code(i);
      digit[m * stride + i] = static_cast<int8_t>(code ? between(-127, 127) : 0);
      if (i < c.k()) given.x.push_back(double{unit[m]} * digit[m * stride + i]);
    }
  }
  check(
      c, set, "rounded", pool, y,
      [&](const Parallel& parallel) {
        products(c, kernels, w, parallel).rounded(digit.data(), unit.data(), y.data());
      },
      [&](const float* found) { return right(c, false, c.n(), {given}, found); });
}

void check_case(const Kernels& kernels, const char* set, const Pool& pool) {
  const Codes kind = static_cast<Codes>(between(0, 4));
  const Case any(kind, false), whole(kind, true);
  check_forward(any, kernels, set, pool);
  check_transposed(any, kernels, set, pool);
  check_integers(whole, kernels, set, pool);
  check_rounded(whole, kernels, set, pool);
  check_blocks(kernels, set, pool);
  check_bytes(kernels, set, pool);
}

}  // namespace
}  // namespace eqquant

int main(int, char** argument) {
  using namespace eqquant;
  const uint64_t seed = std::strtoull(argument[1], nullptr, 10);
  const int64_t cases = std::strtoll(argument[2], nullptr, 10);
  uint32_t here = features_here();
#ifdef EQQUANT_EMULATES_TILES
  if ((here & kAmx) == 0) emulated::install();
  if ((here & kAvx512Bf16) != 0) here |= kAmx;
#endif
  // How much lies together depends on the number of threads, too.
  const Pool pools[] = {Pool(3), Pool(0)};
  random_bits.seed(seed);
  if ((here & (kAvx2 | kNeon)) != 0)
    for (int64_t i = 0; i < cases; ++i) {
      check_encode(pools[i % 2]);
      check_trellis(pools[i % 2]);
    }
  for (const Set& set : sets()) {
    random_bits.seed(seed);
    const bool runs = (set.features & ~here) == 0;
    if (runs)
      for (int64_t i = 0; i < cases; ++i)
        check_case(set.kernels, set.names, pools[i % 2]);
    std::printf("%s: %s\n", set.names, runs ? "done" : "not on this machine");
  }
  std::printf("%" PRId64 " sums, with errors of up to %.1e\n", compared, largest_error);
  std::printf("%" PRId64 " wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
