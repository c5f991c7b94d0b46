// Products of weights of `Blocks` by one or two rows of inputs, of codes that are
// digits of 2 or 4 bits, which are looked up without being unpacked. (AVX512)
//
// A vector has 64 bytes of codes, four in each lane: shifted to the right by a multiple
// of 8 bits, and by those of the digits before it, a digit is the index of a lookup,
// which ignores what is above. So lane `i` of vector `v` is row `4 i + v`.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "decoded.h"
#include "numbers.h"
#include "simd_avx512.h"

namespace eqquant {
namespace {

template <int R, int bits>
class DigitsOfBytes {
 public:
  static constexpr int kDigits = 8 / bits;

  DigitsOfBytes(const Blocks& w, const Numbers<Avx512>& numbers, const FewInputs& x)
      : w_(w), numbers_(numbers), x_(x) {
    float entries[16];
    const int32_t base = w.offset == Offset::kNone ? w.base : 0;
    for (int i = 0; i < 16; ++i) {
      const int code = i & ((1 << bits) - 1);
      const bool integers = w.point_type == PointType::kIntegers;
      entries[i] = integers ? static_cast<float>(code - base) : w.points[code];
    }
    points_ = _mm512_loadu_ps(entries);
  }

  // Adds the products with piece `i` of `count` rows from row `n` to `sums`.
  EQQUANT_INNERMOST void add(int64_t i, int64_t n, int64_t count, float* sums) const {
    Piece<Avx512> piece;
    Places places = {};
    const uint8_t* at = numbers_.read_runs(i, n, count, piece, places);
    const int64_t start = i * numbers_.codes();
    // Bytes of which each digit stays in one run.
    const bool planes = places.next == 1;
    const int64_t length = piece.run[0].last;
    const int64_t bytes = planes ? smaller(length, places.apart) : length / kDigits;
    const int64_t all = piece.number / kDigits;
    for (int64_t b = 0; b < all; b += bytes) {
      const int64_t here = smaller(bytes, all - b);
      int64_t run[kDigits];
      for (int d = 0; d < kDigits; ++d)
        run[d] = (b * places.next + d * places.apart) / length;
      const Part part = {at + b * w_.n,           here,   count,
                         start + b * places.next, places, run};
      w_.offset == Offset::kNone ? this->part<false>(part, piece, sums)
                                 : this->part<true>(part, piece, sums);
    }
  }

 private:
  struct Part {
    const uint8_t* codes;
    int64_t bytes, count;
    int64_t k;  // the position of the first digit of the first byte
    Places places;
    const int64_t* run;  // of each digit
  };

  // With `offset`, what is to be subtracted from codes depends on their run.
  template <bool offset>
  void part(const Part& p, const Piece<Avx512>& piece, float* sums) const {
    __m512 sum[R][kDigits][4], zero[kDigits][4];
    each([&](int r, int d, int v) { sum[r][d][v] = _mm512_setzero_ps(); });
    EQQUANT_UNROLL
    for (int d = 0; offset && d < kDigits; ++d) {
      const __m512i zeros =
          Avx512::load_bytes(piece.zero + piece.run[p.run[d]].first / kRun * 64);
      __m512 less[4] = {};
      if (is_wide(w_)) Avx512::deal(piece.less + p.run[d] * 64, less);
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        const __m512i zero_of = Avx512::both(_mm512_srli_epi32(zeros, 8 * v), 255);
        zero[d][v] = _mm512_add_ps(Avx512::to_floats(zero_of), less[v]);
      }
    }
    const uint8_t* c = p.codes;
    const float* x = x_.x + p.k;
    for (int64_t b = 0; b < p.bytes; ++b, c += w_.n, x += p.places.next) {
      _mm_prefetch(reinterpret_cast<const char*>(c + kAhead), _MM_HINT_T0);
      const __m512i codes =
          p.count == 64 ? Avx512::load_bytes(c) : Avx512::load_bytes(c, p.count);
      EQQUANT_UNROLL
      for (int d = 0; d < kDigits; ++d) {
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          const __m512i index = _mm512_srli_epi32(codes, 8 * v + bits * d);
          __m512 point = _mm512_permutexvar_ps(index, points_);
          if constexpr (offset) point = _mm512_sub_ps(point, zero[d][v]);
          EQQUANT_UNROLL
          for (int r = 0; r < R; ++r)
            sum[r][d][v] = _mm512_fmadd_ps(
                point, _mm512_set1_ps(x[r * w_.k + d * p.places.apart]), sum[r][d][v]);
        }
      }
    }
    EQQUANT_UNROLL
    for (int d = 0; d < kDigits; ++d) {
      const int64_t run = p.run[d];
      __m512 scale[4], rest[4];
      Avx512::deal(piece.scale + run * 64, scale);
      const bool minima = w_.offset == Offset::kMinimum;
      if (minima) Avx512::deal(piece.rest + run * 64, rest);
      EQQUANT_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512 inputs = _mm512_set1_ps(minima ? input_sum(p, r, d) : 0);
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) {
          float* const to = sums + r * 64 + 16 * v;
          __m512 total = _mm512_fmadd_ps(sum[r][d][v], scale[v], _mm512_loadu_ps(to));
          if (minima) total = _mm512_fmadd_ps(rest[v], inputs, total);
          _mm512_storeu_ps(to, total);
        }
      }
    }
  }

  // The sum of the inputs of a digit. Digits side by side share their run, and so the
  // first has them all.
  float input_sum(const Part& p, int64_t r, int64_t d) const {
    if (p.places.next == 1) {
      const int64_t first = p.k + d * p.places.apart;
      return x_.sum(r, first, first + p.bytes);
    }
    return d == 0 ? x_.sum(r, p.k, p.k + p.bytes * kDigits) : 0;
  }

  template <class F>
  static void each(F f) {
    EQQUANT_UNROLL
    for (int r = 0; r < R; ++r) {
      EQQUANT_UNROLL
      for (int d = 0; d < kDigits; ++d) {
        EQQUANT_UNROLL
        for (int v = 0; v < 4; ++v) f(r, d, v);
      }
    }
  }

  const Blocks& w_;
  const Numbers<Avx512>& numbers_;
  const FewInputs& x_;
  __m512 points_;
};

template <int R, int bits>
void few_digits(const Blocks& w, const Numbers<Avx512>& numbers, const FewInputs& x,
                int64_t n, int64_t count, float* sums) {
  const DigitsOfBytes<R, bits> product(w, numbers, x);
  const int64_t panels = divided_up(count, 64), each = R * 64;
  for (int64_t i = 0; i < panels * each; ++i) sums[i] = 0;
  for (int64_t i = 0; i < numbers.pieces(); ++i)
    for (int64_t p = 0; p < panels; ++p)
      product.add(i, n + 64 * p, smaller(64, count - 64 * p), sums + p * each);
  for (float* at = sums; at < sums + panels * each; at += 64) {
    float dealt[64];
    __builtin_memcpy(dealt, at, sizeof(dealt));
    for (int i = 0; i < 64; ++i) at[i] = dealt[i % 4 * 16 + i / 4];
  }
}

template <>
struct WithoutUnpacking<Avx512> {
  static bool multiply(const Blocks& w, const Numbers<Avx512>& numbers,
                       const FewInputs& x, int64_t rows, int64_t n, int64_t count,
                       float* sums) {
    // Blocks should end with bytes, and pieces with blocks.
    const bool whole = static_cast<int32_t>(w.packing) > 8
                           ? w.k % numbers.codes() == 0
                           : w.k % 4 == 0 && (w.block >= w.k || 64 % w.block == 0 ||
                                              w.block % 64 == 0);
    if (!whole || rows > 2) return false;
    if (numbers.digit() == 4) {
      rows == 1 ? few_digits<1, 4>(w, numbers, x, n, count, sums)
                : few_digits<2, 4>(w, numbers, x, n, count, sums);
      return true;
    }
    if (numbers.digit() != 2 || rows != 1) return false;
    few_digits<1, 2>(w, numbers, x, n, count, sums);
    return true;
  }
};

}  // namespace
}  // namespace eqquant
