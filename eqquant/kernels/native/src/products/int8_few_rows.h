// Products of weights along their blocks by a few rows of inputs, in 8-bit integers:
// codes by the digits of the parts of rows.
//
// The sum of a run of codes is exact, in 32 bits. It is scaled, and added to a float32.
#pragma once

#include <cstdint>

#include "products/float32.h"
#include "products/kernels.h"
#include "products/long_sums.h"
#include "products/split_inputs.h"
#include "weight/block_scales.h"
#include "weight/panel_reader.h"
#include "weight/quads.h"

namespace eqquant {
namespace {

// The products of a part of a row of inputs with some codes of a run, up to `most`: for
// each digit, and for `vectors` of the four vectors of a panel.
//
// (All indices are template constants: the compiler keeps arrays that loops index in
// memory, even if it unrolls the loops.)
template <class V, int vectors, int most>
struct DigitSums {
  using B = typename V::Bytes;
  using Ints = typename V::Ints;

  Ints of[3][vectors];

  // Starting with this subtracts `base` from every code.
  EQQUANT_INLINE void start(int32_t base, const int32_t* totals) {
    inlined<3>([&](auto d) EQQUANT_INLINE {
      const Ints less = V::ints(-base * totals[d]);
      inlined<vectors>([&](auto v) EQQUANT_INLINE { of[d][v] = less; });
    });
  }

  // Adds the products with four codes of each row, `codes(v)`.
  template <class Codes>
  EQQUANT_INLINE void add(Codes codes, const int8_t* x, int64_t stride) {
    decltype(all(x)) four[3];
    unrolled<3>([&](auto d) { four[d] = all(x + d * stride); });
    unrolled<vectors>([&](auto v) {
      const Ints mine = codes(v);
      unrolled<3>([&](auto d) {
        of[d][v] = V::template dot8<most>(of[d][v], mine, four[d]);
      });
    });
  }

  // The same for codes in memory.
  EQQUANT_INLINE void add(const uint8_t* codes, const int8_t* x, int64_t stride) {
    decltype(all(x)) four[3];
    inlined<3>([&](auto d) EQQUANT_INLINE { four[d] = all(x + d * stride); });
    inlined<vectors>([&](auto v) EQQUANT_INLINE {
      const Ints mine = B::load(codes + v * B::lanes);
      inlined<3>([&](auto d) EQQUANT_INLINE {
        V::template add_dot8<most>(of[d][v], mine, four[d]);
      });
    });
  }

  // (Otherwise the compiler copies them in each iteration of the loop before.)
  EQQUANT_INLINE void stay_in_registers() {
    inlined<3>([&](auto d) EQQUANT_INLINE {
      inlined<vectors>([&](auto v) EQQUANT_INLINE {
        // (For assembly alone, Clang captures no variables.)
        constexpr int i = decltype(d)::value, j = decltype(v)::value;
        EQQUANT_ADDED_UP(of[i][j]);
      });
    });
  }

  // Adds them to `sums`, scaled, and less the numbers subtracted from codes, for the
  // vectors of run `r` from `first` on.
  template <Offset offset>
  EQQUANT_INLINE void finish(const LaneRuns<V>& runs, int64_t r, int first,
                             const int32_t* totals, float* sums) {
    constexpr float smallest = 1.0f / 254;
    const auto smaller_digit = V::all(smallest);
    const float all[3] = {static_cast<float>(totals[0]), static_cast<float>(totals[1]),
                          static_cast<float>(totals[2])};
    inlined<vectors>([&](auto v) EQQUANT_INLINE {
      const int64_t at = r * LaneRuns<V>::kRows + (first + v) * V::width;
      typename V::Floats digit[3];
      inlined<3>([&](auto d) EQQUANT_INLINE {
        digit[d] = V::to_floats(of[d][v]);
        if constexpr (offset != Offset::kNone)
          digit[d] = V::fnma(V::load(runs.zero + at), V::all(all[d]), digit[d]);
      });
      const auto product = V::fma(V::fma(digit[2], smaller_digit, digit[1]),
                                  smaller_digit, digit[0]);
      float* const to = sums + (first + v) * V::width;
      auto total = V::fma(product, V::load(runs.scale + at), V::load(to));
      if constexpr (offset == Offset::kMinimum)
        total = V::fma(V::load(runs.rest + at),
                       V::all(all[0] + (all[1] + all[2] * smallest) * smallest), total);
      V::store(to, total);
    });
  }

 private:
  // Instructions that take them from a lane need no copies in all lanes.
  static auto all(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    if constexpr (V::signs) return V::in_a_lane(four);
    else return V::ints(four);
  }
};

// Products of the parts of a few rows. With a single part, codes are multiplied while
// they are in registers, if their packing allows it; otherwise they are unpacked first.
template <class V, Unsigned how>
class FewIntegers {
 public:
  using B = typename V::Bytes;
  static constexpr int64_t kRows = Numbers<V>::kRows, W = V::width;

  FewIntegers(const Blocks& w, const RowParts& x, float unit, float* y)
      : w_(w), x_(x), fours_(w), unit_(unit), y_(y) {
    Numbers<V>::with_packing(w.packing, [&](auto packing) {
      constexpr Packing p = decltype(packing)::value;
      with_offset(w.offset, [&](auto offset) {
        constexpr Offset o = decltype(offset)::value;
        if constexpr (has_fours<p>(points_of(how), o))
          columns_ = &FewIntegers::some<p, o>;
      });
    });
  }

  // Computes the products with the `count` rows of the weight from row `n`, which are
  // some panels. `sums` are `LongSums` of each of these and each part of a row of
  // inputs.
  void columns(int64_t n, int64_t count, float* sums) const {
    const int64_t panels = divided_up(count, kRows), each = x_.number * kRows;
    (this->*columns_)(n, count, sums);
    for (int64_t p = 0; p < panels; ++p)
      write(n + p * kRows, smaller(kRows, count - p * kRows), sums + p * each);
  }

 private:
  // The number of vectors of a panel for which the sums of two parts stay in registers,
  // and whether there are enough registers to unpack codes meanwhile.
  static constexpr int kVectors = V::registers / 8;
  static constexpr bool kInRegisters = kVectors == 4;
  // The largest code of a packing, or a larger number if that is as fast.
  template <Packing packing>
  static constexpr int kMost = how == Unsigned::kAsTheyAre && packing != Packing::kBits8
                                   ? V::small
                                   : 255;

  // Takes a unit of each panel in turn, since long runs of memory are read fastest.
  template <Packing packing, Offset offset>
  void some(int64_t n, int64_t count, float* sums) const {
    using P = Packed<packing>;
    constexpr int64_t codes = P::kCodes * P::kSlices;
    const int64_t each = x_.number * kRows, panels = divided_up(count, kRows);
    LongSums<V> all(sums, panels * each, w_.k, summed_codes(w_));
    LaneRuns<V> runs;
    for (int64_t u = 0; u * codes < w_.k; ++u) {
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t first = n + p * kRows, here = smaller(kRows, count - p * kRows);
        const uint8_t* const at = w_.at(u * P::kBytes, first);
        const int64_t ahead = bytes_ahead(p, panels, kRows, P::kBytes, w_);
        const int64_t end = smaller((u + 1) * P::kSlices, divided_up(w_.k, P::kCodes));
        for (int64_t i = u * P::kSlices; i < end; ++i) {
          runs.template set<packing>(w_, i, at, first, here, ahead);
          add<packing, offset>(i, at, here, runs, ahead, sums + p * each);
        }
      }
      all.reach((u + 1) * codes);
    }
    all.finish();
  }

  // Adds the products with piece `i` of a panel.
  template <Packing packing, Offset offset>
  EQQUANT_INNERMOST EQQUANT_FLAT void add(int64_t i, const uint8_t* at, int64_t count,
                             const LaneRuns<V>& runs, int64_t ahead,
                             float* sums) const {
    using P = Packed<packing>;
    const int64_t k = i * P::kCodes;
    if constexpr (kInRegisters) {
      if (x_.number == 1 && count == kRows && k + P::kCodes <= w_.k) {
        if constexpr (is_gguf(packing) && P::kDigit == 4)
          return add_nibbles<packing, offset>(i, at, runs, ahead, sums);
        if constexpr (!is_gguf(packing))
          return add_stream<packing, offset>(k, at, runs, ahead, sums);
      }
    }
    alignas(64) uint8_t codes[P::kCodes * kRows];
    fours_.template unpack<packing>(i, at, count, smaller(P::kCodes, w_.k - k), ahead,
                                    codes);
    constexpr int most = kMost<packing>;
    constexpr int32_t larger = larger_by<packing>;
    for (int64_t r = 0; r < runs.number; ++r) {
      const Totals totals(x_, k, runs.run[r], apart_in_fours(packing));
      int64_t m = 0;
      for (; m + 2 <= x_.number; m += 2)
        multiply<2, offset, most, larger>(codes, runs, r, totals, m, sums + m * kRows);
      if (m < x_.number)
        multiply<1, offset, most, larger>(codes, runs, r, totals, m, sums + m * kRows);
    }
  }

  // The sums of the digits that are multiplied by a run of codes from position `k` on.
  struct Totals {
    // The position of the run, and the number of its codes to multiply: the last codes
    // of a row may be in any of the lanes that are unpacked together.
    int64_t first, count;

    Totals(const RowParts& x, int64_t k, Run run, int64_t apart)
        : first(k + run.first),
          count(rounded_up(run.last - run.first, 4 * apart)),
          groups_(x.stride / kRun + 1),
          begin_(x.before + first / kRun),
          end_(begin_ + rounded_up(count, kRun) / kRun) {}

    // Returns the sums of part `m`.
    EQQUANT_INLINE void operator()(int64_t m, int32_t* totals) const {
      inlined<3>([&](auto d) EQQUANT_INLINE {
        const int64_t i = (3 * m + d) * groups_;
        totals[d] = end_[i] - begin_[i];
      });
    }

   private:
    // `of` is a power of two.
    static int64_t rounded_up(int64_t x, int64_t of) { return (x + of - 1) & -of; }

    int64_t groups_;
    const int32_t *begin_, *end_;
  };

  // Returns the number subtracted from every integer. (With offsets, sums are corrected
  // further.)
  template <Offset offset, int32_t larger>
  int32_t base() const {
    return (offset == Offset::kNone ? fours_.base() : 0) + larger;
  }
  template <Packing packing>
  static constexpr int32_t larger_by = Fours<V, how>::template larger_by<packing>();

  // The same for codes in registers: for GGUF types with two digits in each byte, which
  // belong to one run or to two.
  template <Packing packing, Offset offset>
  void add_nibbles(int64_t i, const uint8_t* at, const LaneRuns<V>& runs,
                   int64_t ahead, float* sums) const {
    using P = Packed<packing>;
    constexpr Places places = P::places(0);
    constexpr bool two = P::kCodes > P::kBlock;
    const int64_t k = i * P::kCodes, stride = x_.stride;
    const Fours<V, how> fours = fours_;
    const Unit<Quads<V>, false> unit = {
        at + P::places(i % P::kSlices).first * w_.stride(), w_.stride(), kRows, 1,
        P::kBytes, ahead};
    const int8_t* const x = x_.digit + k;
    int32_t totals[3];
    DigitSums<V, 4, kMost<packing>> sum;
    Totals(x_, k, runs.run[0], 1)(0, totals);
    sum.start(base<offset, larger_by<packing>>(), totals);
    // (The codes of two runs would not stay in registers.)
    alignas(64) uint8_t bytes[places.apart * kRows];
    for (int64_t b = 0; b < places.apart; b += 4) {
      const auto some = unit[b];
      if constexpr (two)
        unrolled<4>([&](auto v) {
          B::store(bytes + (b + v) * kRows, some.of[v]);
        });
      const auto low = [&](int v) {
        return fours.template of<packing>(moved<B, 0, 4>(some.of[v]));
      };
      const auto high = [&](int v) {
        return fours.template of<packing>(moved<B, 4, 4>(some.of[v]));
      };
      sum.add(low, x + b, stride);
      if (!two) sum.add(high, x + places.apart + b, stride);
    }
    sum.stay_in_registers();
    sum.template finish<offset>(runs, 0, 0, totals, sums);
    if (!two) return;
    Totals(x_, k, runs.run[1], 1)(0, totals);
    sum.start(base<offset, larger_by<packing>>(), totals);
    for (int64_t b = 0; b < places.apart; b += 4) {
      const auto high = [&](int v) {
        return fours.template of<packing>(
            moved<B, 4, 4>(B::load(bytes + (b + v) * kRows)));
      };
      sum.add(high, x + places.apart + b, stride);
    }
    sum.stay_in_registers();
    sum.template finish<offset>(runs, 1, 0, totals, sums);
  }

  // The same for a stream of codes from position `k` on.
  template <Packing packing, Offset offset>
  void add_stream(int64_t k, const uint8_t* at, const LaneRuns<V>& runs, int64_t ahead,
                  float* sums) const {
    constexpr int bits = static_cast<int>(packing);
    constexpr int64_t apart = apart_in_fours(packing) * bits / 8;
    const Fours<V, how> fours = fours_;
    const int64_t stride = x_.stride;
    for (int64_t r = 0; r < runs.number; ++r) {
      const Run run = runs.run[r];
      const Unit<Quads<V>, false> unit = {at + run.first * bits / 8 * w_.stride(),
                                          w_.stride(), kRows, apart, 0, ahead};
      int32_t totals[3];
      Totals(x_, k, run, apart_in_fours(packing))(0, totals);
      DigitSums<V, 4, kMost<packing>> sum;
      sum.start(base<offset, larger_by<packing>>(), totals);
      const int8_t* const x = x_.digit + k + run.first;
      Packed<packing>::unpack(
          unit, 0, run.last - run.first, [&](int64_t i, typename Quads<V>::Vector codes) {
            const auto mine = [&](int v) {
              return fours.template of<packing>(codes.of[v]);
            };
            sum.add(mine, x + i, stride);
          });
      sum.template finish<offset>(runs, r, 0, totals, sums);
    }
  }

  // The same for run `r` of unpacked codes, and `M` parts from part `m` on.
  template <int M, Offset offset, int most, int32_t larger>
  EQQUANT_INNERMOST EQQUANT_FLAT void multiply(const uint8_t* codes,
                                               const LaneRuns<V>& runs, int64_t r,
                                               const Totals& of_run, int64_t m,
                                               float* sums) const {
    int32_t totals[M][3];
    inlined<M>([&](auto i) EQQUANT_INLINE { of_run(m + i, totals[i]); });
    codes += runs.run[r].first * kRows;
    inlined<4 / kVectors>([&](auto j) EQQUANT_INLINE {
      constexpr int first = j * kVectors;
      DigitSums<V, kVectors, most> sum[M];
      inlined<M>([&](auto i) EQQUANT_INLINE {
        sum[i].start(base<offset, larger>(), totals[i]);
      });
      const int64_t stride = x_.stride;
      const int8_t* x = x_.digit + 3 * m * stride + of_run.first;
      const uint8_t* at = codes + first * kRows;
      for (int64_t left = of_run.count; left > 0; left -= 4, x += 4, at += 4 * kRows) {
        inlined<M>([&](auto i) EQQUANT_INLINE {
          sum[i].add(at, x + 3 * i * stride, stride);
        });
      }
      inlined<M>([&](auto i) EQQUANT_INLINE { sum[i].stay_in_registers(); });
      inlined<M>([&](auto i) EQQUANT_INLINE {
        sum[i].template finish<offset>(runs, r, first, totals[i], sums + i * kRows);
      });
    });
  }

  // Adds up the parts of each row of inputs, and writes them to `y`.
  void write(int64_t n, int64_t count, const float* sums) const {
    for (int64_t i = 0; i < x_.number; ++i, sums += kRows) {
      typename V::Floats lane[4], row[4];
      for (int v = 0; v < 4; ++v)
        lane[v] = V::mul(V::load(sums + v * W), V::all(x_.unit[i] * unit_));
      V::to_rows(lane, row);
      const bool first = i == 0 || x_.row[i] != x_.row[i - 1];
      float* const y = y_ + x_.row[i] * w_.n + n;
      for (int64_t v = 0; v < 4 && v * W < count; ++v) {
        const int64_t here = smaller(W, count - v * W);
        if (!first) row[v] = V::add(row[v], V::load(y + v * W, here));
        V::store(y + v * W, row[v], here);
      }
    }
  }

  const Blocks& w_;
  const RowParts& x_;
  Fours<V, how> fours_;
  float unit_;
  float* y_;
  void (FewIntegers::*columns_)(int64_t, int64_t, float*) const = nullptr;
};

template <class V>
int64_t int8_few_rows_panels(const Blocks& w, int64_t parts, int64_t workers) {
  return decoded_panels<V>(w, parts, workers) * Numbers<V>::kRows;
}

template <class V>
int64_t int8_few_rows_scratch(const Blocks& w, int64_t parts, int64_t workers) {
  const int64_t together = int8_few_rows_panels<V>(w, parts, workers);
  return smaller(workers, divided_up(w.n, together)) *
         LongSums<V>::floats(parts * together, w.k);
}

template <class V, Unsigned how>
void int8_few_rows_of(const Blocks& w, const RowParts& x, float unit, float* y,
                      float* scratch, const Parallel& parallel) {
  const int64_t together = int8_few_rows_panels<V>(w, x.number, parallel.workers);
  const int64_t mine = LongSums<V>::floats(x.number * together, w.k);
  const FewIntegers<V, how> product(w, x, unit, y);
  parallel(divided_up(w.n, together), [&](int64_t i, int64_t worker) {
    const int64_t n = i * together;
    in_turns(w, n, smaller(together, w.n - n), [&](int64_t first, int64_t number) {
      product.columns(first, number, scratch + worker * mine);
    });
  });
}

template <class V>
void int8_few_rows(const Blocks& w, const RowParts& x, float unit, float* y,
                   float* scratch, const Parallel& parallel) {
  switch (w.point_type) {
    case PointType::kSigned:
      return int8_few_rows_of<V, Unsigned::kFlipped>(w, x, unit, y, scratch, parallel);
    case PointType::kTable:
      return int8_few_rows_of<V, Unsigned::kLookedUp>(w, x, unit, y, scratch, parallel);
    default:
      return int8_few_rows_of<V, Unsigned::kAsTheyAre>(w, x, unit, y, scratch,
                                                       parallel);
  }
}

template <class V>
constexpr void add_int8_few_rows(Kernels& found) {
  found.has_fours = has_fours;
  found.to_parts = to_parts<V>;
  found.int8_few_rows_scratch = int8_few_rows_scratch<V>;
  found.int8_few_rows = int8_few_rows<V>;
}

}  // namespace
}  // namespace eqquant
