// Compares products of random weights with plain sums in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "case.h"
#include "compare.h"
#include "pool.h"
#include "products/kernels.h"
#include "xla/whole_products.h"

namespace eqquant {
namespace {

// What inputs or numbers of a weight are rounded to, before they are multiplied.
using Round = double (*)(float);
double not_rounded(float x) { return x; }

// Rows of inputs, what those of each row may be off by, and how numbers of the weight
// are rounded.
struct Given {
  std::vector<double> x;
  std::vector<double> unit;
  Round of_w = not_rounded;
};

// Rounded inputs, which may be off by `share` of the largest that is no outlier.
Given given(const Case& c, const float* x, int64_t columns, Round round,
            double share = 0) {
  Given found;
  for (int64_t m = 0; m < c.rows(); ++m) {
    const float* const row = x + m * columns;
    for (int64_t i = 0; i < columns; ++i) found.x.push_back(round(row[i]));
    found.unit.push_back(share == 0 ? 0 : 65 * share * mean_size(row, columns));
  }
  return found;
}

// Whether each of `y` is the product of any of what is given.
bool is_product(const Case& c, bool across, const std::vector<Given>& any,
                const float* y) {
  const int64_t summed = across ? c.n() : c.k(), columns = across ? c.k() : c.n();
  std::vector<double> w(static_cast<size_t>(summed));
  for (int64_t i = 0; i < columns; ++i) {
    std::vector<char> found(static_cast<size_t>(c.rows()));
    for (const Given& some : any) {
      for (int64_t j = 0; j < summed; ++j)
        w[static_cast<size_t>(j)] =
            some.of_w(static_cast<float>(across ? c.number(j, i) : c.number(i, j)));
      for (size_t m = 0; m < found.size(); ++m)
        found[m] = found[m] || close(y[static_cast<int64_t>(m) * columns + i],
                                     some.x.data() + m * w.size(), w, some.unit[m]);
    }
    for (const char each : found)
      if (!each) return false;
  }
  return true;
}

// What two digits and outliers make of a row `x`, or nothing if that is not close to
// it.
std::vector<double> from_digits(const Digits& digits, int64_t m, const float* x,
                                int64_t k) {
  std::vector<double> found;
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
      const bool near = std::isfinite(same)
                            ? std::abs(same - x[i]) <= 1e-6 * std::abs(x[i])
                            : !(std::abs(x[i]) < 1e20 * unit);
      if (found.back() != 0 || !near) return {};
      found.back() = x[i];
      ++outlier;
    } else if (!(std::abs(x[i] - found.back()) <= 0.51 * unit / 254 + 1e-38)) {
      return {};
    }
  }
  return found;
}

// The products of a case by the kernels of a set.
class Checks {
 public:
  Checks(const Case& c, const Kernels& kernels, const char* set, const Pool& pool,
         bool tiles)
      : c_(c), kernels_(kernels), set_(set), pool_(pool), tiles_(tiles) {}

  // Those of any weight.
  void any() const {
    floats("float32", false, [](const auto& whole, const float* x, float* y) {
      return whole.float32(x, y);
    });
    floats("float32_across", true, [](const auto& whole, const float* x, float* y) {
      return whole.float32_across(x, y);
    });
    integers();
    if (kernels_.bfloat16 != nullptr && w_.packing != Packing::kTrits)
      narrow("bfloat16", rounded_to_bfloat16,
             [](const auto& whole, const float* x, float* y) {
               return whole.bfloat16(x, y);
             });
  }

  // Those of bytes of whole codes.
  void in_bytes() const {
    floats("lookup_tables", false, [](const auto& whole, const float* x, float* y) {
      return whole.lookup_tables(x, y);
    });
    floats("transposed", true, [](const auto& whole, const float* x, float* y) {
      return whole.transposed(x, y);
    });
    const bool nibbles = w_.packing == Packing::kBits4 && w_.offset == Offset::kNone;
    if (kernels_.bfloat16_nibbles != nullptr && nibbles && c_.are_narrow())
      narrow("bfloat16_nibbles", tiles_ ? rounded_to_bfloat16 : not_rounded,
             [](const auto& whole, const float* x, float* y) {
               return whole.bfloat16_nibbles(x, y);
             });
    if (kernels_.int8 == nullptr || !are_integers()) return;
    digits();
    rounded();
  }

 private:
  // Runs a product on several threads and on one, which find the same bits.
  template <class Product>
  Buffer<float> run(const Kernels& kernels, const Blocks& w, int64_t columns,
                    Product product) const {
    auto y = c_.buffer(c_.rows() * columns), again = c_.buffer(c_.rows() * columns);
    const Pool alone(0);
    for (const Pool* some : {&pool_, &alone})
      product(Products<Guarded>(kernels, w, c_.rows(), some->parallel()),
              some == &pool_ ? y.data() : again.data());
    if (std::memcmp(y.data(), again.data(), y.size() * sizeof(float)) != 0)
      fail("not the same on one thread");
    return y;
  }

  void fail(const char* what) const {
    report(set_, what, [&] { c_.print(); });
  }

  template <class Product>
  void floats(const char* what, bool across, Product product) const {
    const auto x = c_.inputs(across ? c_.n() : c_.k());
    const auto y =
        run(kernels_, w_, across ? c_.k() : c_.n(),
            [&](const auto& whole, float* y) { product(whole, x.data(), y); });
    const auto exact = given(c_, x.data(), across ? c_.n() : c_.k(), not_rounded);
    if (!is_product(c_, across, {exact}, y.data())) fail(what);
  }

  template <class Product>
  void narrow(const char* what, Round of_w, Product product) const {
    const auto x = c_.inputs(c_.k());
    const auto y = run(kernels_, w_, c_.n(), [&](const auto& whole, float* y) {
      product(whole, x.data(), y);
    });
    // (A scale that is computed has an error in float32. Now and then a weight is
    // rounded to the other bfloat16, which is a 256th of it away.)
    double share = has_factor(w_.scales.scale_type) ? 1.0 / (65 * 8192) : 0;
    // (Nor are sums of so many terms as exact as those of floats.)
    if (c_.is_long()) share = 1e-3 / 65;
    Given rounded = given(c_, x.data(), c_.k(), rounded_to_bfloat16, share);
    rounded.of_w = of_w;
    const Given exact = given(c_, x.data(), c_.k(), not_rounded);
    if (!is_product(c_, false, {rounded, exact}, y.data())) fail(what);
  }

  // Products of integers of 16 bits, and of 8, of weights for which there are some.
  void integers() const {
    if (w_.point_type == PointType::kE4M3 || w_.point_type == PointType::kE5M2) return;
    Blocks w = w_;
    std::vector<float> points(w.points, w.points + 256);
    for (float& point : points) point /= c_.unit();
    const bool table = w.point_type == PointType::kTable;
    if (table) w.points = points.data();
    const float unit = table ? c_.unit() : 1;
    const auto x = c_.inputs(c_.k());
    // `share`: what inputs may be off by, of the largest that is no outlier.
    const auto check = [&](const char* what, double share, auto product) {
      const auto y = run(kernels_, w, c_.n(), product);
      const auto near = given(c_, x.data(), c_.k(), not_rounded, share);
      if (!is_product(c_, false, {near}, y.data())) fail(what);
    };
    if (kernels_.int16 != nullptr)
      check("int16", 0.51 / kMostWord,
            [&](const auto& whole, float* y) { whole.int16(x.data(), y, unit); });
    if (kernels_.int8_few_rows == nullptr || c_.rows() > kFewPartRows ||
        !kernels_.has_fours(w))
      return;
    check("int8_few_rows", 0.51 / (127.0 * 254 * 254),
          [&](const auto& whole, float* y) { whole.int8_few_rows(x.data(), y, unit); });
  }

  bool are_integers() const {
    if (w_.packing == Packing::kBits1) return w_.points[0] == -1 && w_.points[1] == 1;
    return w_.point_type == PointType::kSigned || w_.point_type == PointType::kIntegers;
  }

  // Of inputs in two digits, which should be close to them.
  void digits() const {
    const auto x = c_.inputs(c_.k());
    const int64_t stride = codes_of(w_.packing, w_.in_bytes.row);
    const int64_t most = c_.k() / kOutlierShare;
    const Guarded<int8_t> digit(2 * c_.rows() * stride);
    const Guarded<float> unit(c_.rows());
    const Guarded<int32_t> outliers(c_.rows());
    const Guarded<Outlier> outlier(c_.rows() * most);
    const Digits two = {2,          c_.rows(), stride,         digit.get(),
                        unit.get(), most,      outliers.get(), outlier.get()};
    kernels_.to_digits(x.data(), c_.k(), two, digit.get(), unit.get(), outliers.get(),
                       outlier.get(), pool_.parallel());
    const Given exact = given(c_, x.data(), c_.k(), not_rounded);
    Given near = {{}, exact.unit};
    bool ordinary = true;
    for (int64_t m = 0; m < c_.rows(); ++m) {
      const float* const mine = x.data() + m * c_.k();
      ordinary = ordinary && outliers.get()[m] <= 0;
      const auto row = outliers.get()[m] == kNoDigits
                           ? std::vector<double>(mine, mine + c_.k())
                           : from_digits(two, m, mine, c_.k());
      if (row.empty()) return fail("digits");
      near.x.insert(near.x.end(), row.begin(), row.end());
    }
    check_int8("int8", {near, exact}, ordinary,
               [&](const auto& whole, float* y) { whole.int8(x.data(), y); });
  }

  // Of one digit.
  void rounded() const {
    const auto digit = Buffer<int8_t>(c_.rows() * c_.k(), c_.place());
    const auto unit = c_.buffer(c_.rows()), x = c_.buffer(c_.rows() * c_.k());
    for (int64_t m = 0; m < c_.rows(); ++m) {
      unit[m] = chance(0.1) ? strange() : std::exp(normal());
      for (int64_t i = m * c_.k(); i < (m + 1) * c_.k(); ++i) {
        digit[i] = static_cast<int8_t>(between(-127, 127));
        x[i] = unit[m] * digit[i];
      }
    }
    check_int8(
        "int8, rounded", {given(c_, x.data(), c_.k(), not_rounded)}, true,
        [&](const auto& whole, float* y) { whole.int8(digit.data(), unit.data(), y); });
  }

  // `same`: whether tiles find the same bits as registers.
  template <class Product>
  void check_int8(const char* what, const std::vector<Given>& any,
                  [[maybe_unused]] bool same, Product product) const {
    const auto y = run(kernels_, w_, c_.n(), product);
    if (!is_product(c_, false, any, y.data())) fail(what);
#ifdef __x86_64__
    // (Squares of tiles scale sums over whole rows, once.)
    const bool squares = w_.in_bytes.blocks == 1 && c_.rows() >= 32;
    if (!tiles_ || !same || squares) return;
    const auto other = run(table_of(kAvx512), w_, c_.n(), product);
    if (std::memcmp(other.data(), y.data(), y.size() * sizeof(float)) != 0)
      fail("not the same bits as in registers");
#endif
  }

  const Case& c_;
  const Blocks w_ = c_.weight();
  const Kernels& kernels_;
  const char* set_;
  const Pool& pool_;
  bool tiles_;
};

}  // namespace
}  // namespace eqquant
