// Products along the blocks, in 8-bit integers: codes by digits of `x`. A task unpacks
// segments of its panels to bytes, multiplies them by all rows of digits, and adds the
// scaled results to float32 sums, which it finally writes to `y`.
#pragma once

#include <cstdint>

#include "products/columns.h"
#include "products/kernels.h"
#include "products/round_inputs.h"
#include "products/segments.h"
#include "weight/panel.h"

namespace eqquant {
namespace {

// The largest number of adjacent panels of a task.
constexpr int kIntegersPanels = 8;

// The number of segments after which sums are added up in float64.
constexpr int64_t kSummedSegments = 64;

// Adds a vector of results to `sums`: the `products` of codes (less the offset) with
// one or two digits are corrected for the zero-point by `totals`, combined, and scaled.
template <class V, int digits>
void add_scaled(const Blocks& w, const Unpacked<V>& codes, int v,
                const typename V::Ints* products, const int32_t* totals, float* sums) {
  typename V::Floats sum[digits];
  EQQUANT_UNROLL
  for (int d = 0; d < digits; ++d) {
    sum[d] = V::to_floats(products[d]);
    if (w.zero_points != nullptr)
      sum[d] = V::fnma(codes.zero[v], V::all(static_cast<float>(totals[d])), sum[d]);
  }
  if constexpr (digits == 2) sum[0] = V::fma(sum[1], V::all(1.0f / 254), sum[0]);
  V::store(sums, V::fma(sum[0], codes.scale[v], V::load(sums)));
}

// The outliers of rows of digits, by the segments of the weight that they multiply.
class Outliers {
 public:
  // The size of the scratch memory, in units of 32 bits.
  static int64_t scratch(const Blocks& w, const Digits& x) {
    return x.outliers == nullptr ? 0 : (Segment::number(w) + 1) * x.rows;
  }

  Outliers(const Blocks& w, const Digits& x, int32_t* scratch, const Parallel& parallel)
      : w_(w), x_(x), first_(scratch) {
    if (none()) return;
    parallel(x.rows, [&](int64_t m, int64_t) {
      const Outlier* const mine = x.outlier + m * x.most;
      int32_t i = 0;
      for (int64_t s = 0; s <= Segment::number(w); ++s) {
        const int64_t k = s == Segment::number(w)
                              ? w.in_bytes.row * codes_per_byte(w.packing)
                              : Segment::of(w, s).first * codes_per_byte(w.packing);
        while (i < x.outliers[m] && mine[i].k < k) ++i;
        scratch[s * x.rows + m] = i;
      }
    });
  }

  bool none() const { return x_.outliers == nullptr; }

  // Adds the products of outliers with consecutive segments.
  template <class V>
  void add(const UnpackedSegments<V>& segments, float* sums) const {
    const int32_t* const first = first_ + segments.of[0].segment * x_.rows;
    const int32_t* const last = first + segments.number * x_.rows;
    for (int64_t m = 0; m < x_.rows; ++m)
      if (first[m] != last[m])
        for (const Unpacked<V>& codes : segments)
          add(codes, m, sums + m * Panel<V>::kRows);
  }

 private:
  template <class V>
  void add(const Unpacked<V>& unpacked, int64_t m, float* sums) const {
    constexpr int64_t kRows = Panel<V>::kRows, W = V::width;
    const int32_t* const first = first_ + unpacked.segment * x_.rows + m;
    if (first[0] == first[x_.rows]) return;
    const Outlier* const last = x_.outlier + m * x_.most + first[x_.rows];
    typename V::Floats less[4], sum[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      less[v] = V::add(unpacked.zero[v], V::all(static_cast<float>(Panel<V>::offset(w_))));
      sum[v] = V::zero();
    }
    for (const Outlier* at = x_.outlier + m * x_.most + first[0]; at < last; ++at) {
      const int64_t k = at->k - unpacked.k;
      const uint8_t* const codes = unpacked.codes + k / 4 * 4 * kRows;
      // Selects one byte of each four.
      const auto which = V::ints(1 << k % 4 * 8);
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        const auto four = V::Bytes::load(codes + v * kRows);
        const auto code = V::to_floats(V::dot8(V::ints(0), four, which));
        sum[v] = V::fma(V::sub(code, less[v]), V::all(at->x), sum[v]);
      }
    }
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      float* const to = sums + W * v;
      V::store(to, V::fma(sum[v], unpacked.scale[v], V::load(to)));
    }
  }

  const Blocks& w_;
  const Digits& x_;
  const int32_t* first_;
};

// Multiplies panels by rows of digits. Sums of a few rows stay in registers.
template <class V>
class IntegersInRegisters {
 public:
  static constexpr int64_t kRows = Panel<V>::kRows, W = V::width;
  // The number of codes of a row that are unpacked at a time.
  static constexpr int64_t kCodes = kIntegersCodes;
  // Segments are padded with zeros to a multiple of this many codes.
  static constexpr int64_t kWhole = 4;
  // Whether sums are updated only once, after all products.
  static constexpr bool kOnce = false;
  // A resource that a thread holds while it multiplies: none.
  struct Scope {};

  static int64_t scratch(const Blocks&, const Digits&) { return 0; }

  // The number of rows of floats of a panel: its sums come first.
  static int64_t rows_of_sums(const Digits& x) { return x.rows; }

  // `totals`: the results of `sum_up` for each row of digits.
  IntegersInRegisters(const Blocks& w, const Digits& x, const int32_t* totals, float*,
                      const Parallel&)
      : w_(w), x_(x), totals_(totals) {}

  template <int64_t panels>
  void add(const UnpackedSegments<V>& segments, float* sums,
           const Soon<panels>& soon) const {
    int64_t m = 0;
    auto some = [&](auto rows, auto digits) {
      constexpr int R = decltype(rows)::value;
      for (; m + R <= x_.rows; m += R) {
        const auto mine = soon.part(m / R, divided_up(x_.rows, R));
        int64_t i = 0;
        for (const Unpacked<V>& codes : segments)
          multiply<R, decltype(digits)::value>(m, codes, sums + m * kRows,
                                               mine.part(i++, segments.number));
      }
    };
    constexpr bool many = V::registers > 16;
    if (x_.number == 2) {
      if constexpr (many) some(Number<3>(), Number<2>());
      if constexpr (many) some(Number<2>(), Number<2>());
      some(Number<1>(), Number<2>());
    } else {
      if constexpr (many) some(Number<6>(), Number<1>());
      if constexpr (many) some(Number<4>(), Number<1>());
      some(Number<2>(), Number<1>());
      some(Number<1>(), Number<1>());
    }
  }

 private:
  // Adds the products of `R` rows of digits with the rows of a panel to `sums`.
  template <int R, int digits, int64_t panels>
  EQQUANT_INNERMOST void multiply(int64_t m, const Unpacked<V>& unpacked, float* sums,
                                  Soon<panels> soon) const {
    const int64_t fours = unpacked.fours;
    const int64_t each = fours == 0 ? 0 : divided_up(soon.bytes, fours);
    const uint8_t* codes = unpacked.codes;
    const int8_t* x = x_.digit + m * x_.stride + unpacked.k;
    const int64_t stride = x_.stride, second = x_.rows * stride;
    int32_t total[R * digits];
    typename V::Ints sum[R * digits][4];
    EQQUANT_UNROLL
    for (int r = 0; r < R * digits; ++r) {
      const int64_t row = r % digits * x_.rows + m + r / digits;
      total[r] = totals_[row * Segment::number(w_) + unpacked.segment];
      // Starting here subtracts the offset from every code.
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) sum[r][v] = V::ints(-Panel<V>::offset(w_) * total[r]);
    }
    for (int64_t q = 0; q < fours; ++q, x += 4, codes += 4 * kRows) {
      soon.ask(each);
      typename V::Ints w[4];
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) w[v] = V::Bytes::load(codes + v * kRows);
      EQQUANT_UNROLL
      for (int r = 0; r < R * digits; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + r / digits * stride + r % digits * second, 4);
        const auto all = V::ints(four);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v)
          sum[r][v] = V::dot8(sum[r][v], w[v], all);
      }
    }
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        typename V::Ints products[digits];
        EQQUANT_UNROLL
        for (int d = 0; d < digits; ++d) {
          products[d] = sum[r * digits + d][v];
          EQQUANT_ADDED_UP(products[d]);
        }
        add_scaled<V, digits>(w_, unpacked, v, products, total + r * digits,
                              sums + r * kRows + W * v);
      }
    }
  }

  const Blocks& w_;
  const Digits& x_;
  const int32_t* totals_;
};

// Products with the rows of up to `kTogether` adjacent panels of 64 rows, which `Rows`
// multiplies by digits.
template <class V, int64_t kTogether, class Rows>
class Integers {
 public:
  static constexpr int64_t kRows = Panel<V>::kRows, W = V::width;

  Integers(const Blocks& w, const Digits& x, const Rows& rows, const Outliers& outliers,
           float* y)
      : w_(w), x_(x), rows_(rows), outliers_(outliers), y_(y) {}

  // Computes the products with the `count` rows of `W` from row `n`, which are the
  // panels.
  template <Packing packing>
  EQQUANT_INNERMOST void columns(int64_t n, int64_t count, float* sums) const {
    const int64_t codes = whole(codes_of(packing, Segment::bytes(w_)));
    const int64_t together = smaller(kSegments, Rows::kCodes / codes);
    const int64_t panels = divided_up(count, kRows);
    const int64_t each = Rows::rows_of_sums(x_) * kRows;
    [[maybe_unused]] const typename Rows::Scope scope;
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t i = 0; i < x_.rows * kRows; ++i) sums[p * each + i] = 0;
    LongSums<V> all(sums, panels, x_.rows * kRows, each, sums + panels * each,
                    Rows::kOnce ? 0 : w_.in_bytes.row * codes_per_byte(packing),
                    kLeastSummed);
    for (int64_t i = 0, end; i < Segment::number(w_); i = end) {
      const int64_t summed = (i / kSummedSegments + 1) * kSummedSegments;
      end = smaller(smaller(i + together, summed), Segment::number(w_));
      const int64_t last = Segment::of(w_, end - 1).last;
      const int64_t next =
          smaller(together * Segment::bytes(w_), w_.in_bytes.row - last);
      const Soon<kTogether> soon = {w_.bytes + last * w_.n + n, w_.n, next};
      for (int64_t p = 0; p < panels; ++p)
        some<packing>(n + p * kRows, smaller(kRows, count - p * kRows), i, end,
                      sums + p * each, soon.part(p, panels));
      if (end == summed) all.reach(last * codes_per_byte(packing));
    }
    all.finish();
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t m = 0; m < x_.rows; ++m)
        write(m, n + p * kRows, smaller(kRows, count - p * kRows),
              sums + p * each);
  }

 private:
  static int64_t whole(int64_t codes) {
    return divided_up(codes, Rows::kWhole) * Rows::kWhole;
  }

  // Unpacks and multiplies the segments from `begin` to `end` of a panel.
  template <Packing packing>
  EQQUANT_INNERMOST void some(int64_t n, int64_t count, int64_t begin, int64_t end,
                              float* sums, const Soon<kTogether>& soon) const {
    alignas(64) uint8_t codes[Rows::kCodes * kRows];
    UnpackedSegments<V> segments;
    segments.number = end - begin;
    uint8_t* at = codes;
    for (int64_t i = 0; i < segments.number; ++i) {
      const Segment s = Segment::of(w_, begin + i);
      Unpacked<V>& unpacked = segments.of[i];
      unpacked.codes = at;
      unpacked.segment = begin + i;
      unpacked.fours = codes_of(packing, s.last - s.first) / 4;
      unpacked.k = s.first * codes_per_byte(packing);
      set_columns(s.block, n, count, unpacked);
      Panel<V>::template unpack<packing>(w_, n, count, s.first, s.last, at);
      uint8_t* const last = at + whole(4 * unpacked.fours) * kRows;
      for (at += unpacked.fours * 4 * kRows; at < last; at += kRows)
        V::Bytes::store(at, V::Bytes::all(0));
    }
    rows_.add(segments, sums, soon);
    if (!outliers_.none()) outliers_.add(segments, sums);
  }

  void set_columns(int64_t block, int64_t n, int64_t count, Unpacked<V>& unpacked) const {
    typename V::Floats scale[4], zero[4];
    scales_of_panel<V>(w_, block, n, count, scale);
    for (int64_t v = 0; v < 4; ++v) {
      zero[v] = V::zero();
      if (w_.zero_points == nullptr || count <= W * v) continue;
      const uint8_t* const at = w_.zero_points + block * w_.n + n + W * v;
      zero[v] = V::to_floats(V::template bytes<false>(at, smaller(W, count - W * v)));
    }
    V::to_lanes(scale, unpacked.scale);
    V::to_lanes(zero, unpacked.zero);
  }

  EQQUANT_INNERMOST void write(int64_t m, int64_t n, int64_t count,
                               const float* sums) const {
    typename V::Floats lane[4], row[4];
    for (int v = 0; v < 4; ++v)
      lane[v] = V::mul(V::load(sums + m * kRows + W * v), V::all(x_.unit[m]));
    V::to_rows(lane, row);
    for (int64_t v = 0; v < 4 && W * v < count; ++v)
      V::store(y_ + m * w_.n + n + W * v, row[v], smaller(W, count - W * v));
  }

  const Blocks& w_;
  const Digits& x_;
  const Rows& rows_;
  const Outliers& outliers_;
  float* y_;
};

template <class V, class Rows>
int64_t int8_scratch(const Blocks& w, const Digits& x, int64_t workers) {
  return x.number * x.rows * Segment::number(w) + Outliers::scratch(w, x) +
         Rows::scratch(w, x) +
         sums_of_columns<V, kIntegersPanels>(w, Rows::rows_of_sums(x), workers);
}

template <class V, class Rows>
void int8(const Blocks& w, const Digits& x, float* y, float* scratch,
          const Parallel& parallel) {
  const int64_t each = Rows::rows_of_sums(x);
  float* const sums = scratch + Rows::scratch(w, x);
  int32_t* const totals = reinterpret_cast<int32_t*>(
      sums + sums_of_columns<V, kIntegersPanels>(w, each, parallel.workers));
  parallel(x.number * x.rows, [&](int64_t row, int64_t) {
    sum_up<V>(w, x, row, totals + row * Segment::number(w));
  });
  const Outliers outliers(w, x, totals + x.number * x.rows * Segment::number(w),
                          parallel);
  const Rows rows(w, x, totals, scratch, parallel);
  over_columns<V, kIntegersPanels>(
      w, each, sums, parallel,
      [&](auto panels, int64_t n, int64_t count, float* mine) {
        const Integers<V, decltype(panels)::value, Rows> product(w, x, rows, outliers, y);
        with_whole_bytes(w.packing, [&](auto packing) {
          product.template columns<decltype(packing)::value>(n, count, mine);
        });
      });
}

template <class V>
constexpr void add_int8(Kernels& found) {
  found.to_digits = to_digits<V>;
  found.int8_scratch = int8_scratch<V, IntegersInRegisters<V>>;
  found.int8 = int8<V, IntegersInRegisters<V>>;
}

}  // namespace
}  // namespace eqquant
