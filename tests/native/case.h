// Random weights, and the number that each code stands for, read off the
// bytes as the formats define them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "random.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

// A block of one of GGUF's types, as ggml's `dequantize_row_*` read it.
struct GGUFBlock {
  Packing packing;
  const uint8_t* byte;  // one after another
  const float* points;
  const uint16_t* codebook;

  static int64_t codes(Packing p) {
    const bool small =
        p == Packing::kQ4_1 || p == Packing::kQ5_0 || p == Packing::kQ5_1;
    return small ? 32 : 256;
  }
  static int64_t bytes(Packing p) {
    switch (p) {
      case Packing::kQ4_1: return 20;
      case Packing::kQ5_0: return 22;
      case Packing::kQ5_1: return 24;
      case Packing::kQ2_K: return 84;
      case Packing::kQ3_K: return 110;
      case Packing::kQ4_K: return 144;
      case Packing::kQ5_K: return 176;
      case Packing::kIQ4_XS: return 136;
      case Packing::kIQ1_S: return 50;
      case Packing::kIQ1_M: return 56;
      case Packing::kIQ2_XXS: return 66;
      case Packing::kIQ2_XS: return 74;
      case Packing::kIQ2_S: return 82;
      case Packing::kIQ3_XXS: return 98;
      case Packing::kIQ3_S: return 110;
      default: return 210;
    }
  }

  double number(int64_t k) const {
    const int64_t i = k % 32, j = k / 32, low = k % 16;
    switch (packing) {
      case Packing::kQ4_1: return rounded(nibble(4 + low, k / 16) * half(0) + half(2));
      case Packing::kQ5_0:
        return (nibble(6 + low, k / 16) + 16 * bit(2 + k / 8, k % 8) - 16) * half(0);
      case Packing::kQ5_1:
        return rounded(
            (nibble(8 + low, k / 16) + 16 * bit(4 + k / 8, k % 8)) * half(0) + half(2));
      case Packing::kQ2_K: {
        const int code = byte[16 + k / 128 * 32 + i] >> (2 * (j % 4)) & 3;
        const int both = byte[k / 16];
        return rounded(code * (half(80) * (both & 15)) - half(82) * (both >> 4));
      }
      case Packing::kQ3_K: {
        const int code = byte[32 + k / 128 * 32 + i] >> (2 * (j % 4)) & 3;
        const int64_t s = k / 16;
        const int scale =
            nibble(96 + s % 8, s / 8) | (byte[104 + s % 4] >> (2 * (s / 4)) & 3) << 4;
        return (code + 4 * bit(i, j) - 4) * (half(108) * (scale - 32));
      }
      case Packing::kQ4_K: return of_ranges(nibble(16 + k / 64 * 32 + i, j % 2), j);
      case Packing::kQ5_K:
        return of_ranges(nibble(48 + k / 64 * 32 + i, j % 2) + 16 * bit(16 + i, j), j);
      case Packing::kIQ4_XS: {
        const int steps =
            nibble(4 + j / 2, j % 2) | (byte[2 + j / 4] >> (2 * (j % 4)) & 3) << 4;
        return rounded(points[nibble(8 + 16 * j + low, k / 16 % 2)] *
                       (half(0) * (steps - 32)));
      }
      case Packing::kIQ1_S: {
        const int high = word(34 + 2 * j), add = high >> 15 ? -1 : 1;
        const int index = byte[2 + k / 8] | (high >> (3 * (k / 8 % 4)) & 7) << 8;
        return (digit(index, k % 8, 2) - 1 + add / 8.0) * half(0) *
               (2 * (high >> 12 & 7) + 1);
      }
      case Packing::kIQ1_M: {
        const int high = nibble(32 + k / 16, k / 8 % 2), add = high >> 3 ? -1 : 1;
        const int index = byte[k / 8] | (high & 7) << 8;
        int scale = 0;
        for (int i = 0; i < 4; ++i) scale |= word(48 + 2 * i) >> 12 << 4 * i;
        const int steps = word(48 + k / 64 * 2) >> (3 * (k / 16 % 4)) & 7;
        return (digit(index, k % 8, 2) - 1 + add / 8.0) *
               float16_to_double(static_cast<uint16_t>(scale)) * (2 * steps + 1);
      }
      case Packing::kIQ2_XXS: {
        const int64_t at = 2 + 8 * j;
        const int64_t last = word(at + 4) | int64_t{word(at + 6)} << 16;
        return sign(parity(last >> (7 * (k / 8 % 4)) & 127), k % 8) *
               iq2(byte[at + k / 8 % 4], k % 8) * half(0) * (0.5 + (last >> 28)) / 4;
      }
      case Packing::kIQ2_XS: {
        const int both = word(2 + k / 8 * 2);
        return sign(parity(both >> 9), k % 8) * iq2(both & 511, k % 8) * half(0) *
               (0.5 + nibble(66 + j, k / 16 % 2)) / 4;
      }
      case Packing::kIQ2_S: {
        const int index = byte[2 + k / 8] | (byte[66 + j] >> (2 * (k / 8 % 4)) & 3)
                                                << 8;
        return sign(byte[34 + k / 8], k % 8) * iq2(index, k % 8) * half(0) *
               (0.5 + nibble(74 + j, k / 16 % 2)) / 4;
      }
      case Packing::kIQ3_XXS: {
        const int64_t at = 66 + 4 * j;
        const int64_t last = word(at) | int64_t{word(at + 2)} << 16;
        const int sizes[] = {4, 12, 20, 28, 36, 44, 52, 62};
        return sign(parity(last >> (7 * (k / 8 % 4)) & 127), k % 8) *
               sizes[digit(byte[2 + k / 4], k % 4, 4)] * half(0) *
               (0.5 + (last >> 28)) / 2;
      }
      case Packing::kIQ3_S: {
        const int index = byte[2 + k / 4] | bit(66 + j, k / 4 % 8) << 8;
        return sign(byte[74 + k / 8], k % 8) * (2 * digit(index, k % 4, 4) + 1) *
               half(0) * (2 * nibble(106 + j / 2, j % 2) + 1);
      }
      default: {
        const int64_t l = k % 128;
        const int code = nibble(k / 128 * 64 + l % 64, l / 64) |
                         (byte[128 + k / 128 * 32 + i] >> (2 * (l / 32)) & 3) << 4;
        return (code - 32) * (half(208) * static_cast<int8_t>(byte[192 + k / 16]));
      }
    }
  }

 private:
  int nibble(int64_t at, int64_t which) const { return byte[at] >> (4 * which) & 15; }
  int bit(int64_t at, int64_t which) const { return byte[at] >> which & 1; }
  int word(int64_t at) const { return byte[at] | byte[at + 1] << 8; }
  int digit(int index, int64_t i, int64_t bits) const {
    return codebook[index] >> (bits * i) & ((1 << bits) - 1);
  }
  int iq2(int index, int64_t i) const {
    const int sizes[] = {8, 25, 43};
    return sizes[digit(index, i, 2)];
  }
  static int sign(int64_t signs, int64_t i) { return signs >> i & 1 ? -1 : 1; }
  // With an eighth bit, so that the number of ones is even.
  static int64_t parity(int64_t signs) {
    int64_t ones = 0;
    for (int i = 0; i < 7; ++i) ones += signs >> i & 1;
    return signs | ones % 2 << 7;
  }
  // (Products are exact in float32; sums are not.)
  static double rounded(double x) { return static_cast<float>(x); }
  double half(int64_t at) const {
    return float16_to_double(static_cast<uint16_t>(byte[at] | byte[at + 1] << 8));
  }
  double of_ranges(int code, int64_t j) const {
    const uint8_t* const s = byte + 4;
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    const int low = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    return rounded(code * (half(0) * scale) - half(2) * low);
  }
};

class Case {
 public:
  // `in_bytes`: of bytes of whole codes of a block, side by side.
  explicit Case(bool in_bytes)
      : long_(some_long()),
        in_bytes_(in_bytes),
        packing_(some_packing()),
        gguf_(is_gguf(packing_)),
        in_panels_(!in_bytes && chance(0.3)),
        n_(long_ == Long::kRows ? 64 * between(80, 300) : some_rows(in_panels_, long_)),
        k_(long_ == Long::kCodes ? 16 * between(300, 1500)
           : long_ == Long::kRows ? between(1, 30)
           : chance(0.5)          ? 16 * between(1, 60)
                                  : between(1, 700)),
        block_(chance(0.2) ? k_ : some_step() * between(1, chance(0.5) ? 4 : 20)),
        rows_(between(1, chance(0.5) || is_long() ? 5 : chance(0.9) ? 40 : 300)),
        units_(divided_up(k_, unit_codes())),
        place_(static_cast<Place>(between(0, 2))),
        scale_type_(static_cast<ScaleType>(between(0, gguf_ ? 2 : 5))),
        factor_(some_factor(scale_type_)),
        point_type_(some_points()),
        offset_(some_offset()),
        base_(point_type_ == PointType::kIntegers && offset_ != Offset::kZeroPoint
                  ? between(0, 1 << bits()) / 2
                  : 0),
        columns_(chance(0.2) ? 1 : n_),
        unit_(chance(0.5) ? 1.0f / 256 : 1.0f / 32),
        codes_(units_ * unit_bytes() * n_, place_),
        scales_(bytes_of(scale_type_) * blocks() * columns_, place_),
        offsets_(4 * blocks() * n_, place_),
        points_(256, place_),
        codebook_(larger(1, codebook_points(packing_)), place_) {
    for (size_t i = 0; i < codes_.size(); ++i)
      codes_[static_cast<int64_t>(i)] = static_cast<uint8_t>(between(0, 255));
    if (packing_ == Packing::kTrits)
      for (size_t i = 0; i < codes_.size(); ++i) codes_[static_cast<int64_t>(i)] %= 243;
    // Finite scales, most of the time.
    if (gguf_ && chance(0.8))
      for (size_t i = 0; i < codes_.size(); ++i)
        codes_[static_cast<int64_t>(i)] &= 0xbf;
    const bool integers = point_type_ == PointType::kIntegers;
    const bool ends = packing_ == Packing::kBits1 && chance(0.5);
    for (int64_t i = 0; i < 256; ++i)
      points_[i] = integers ? static_cast<float>(i - base_)
                   : ends   ? static_cast<float>(2 * i - 1)
                            : std::round(normal() / unit_) * unit_;
    const bool few = packing_ == Packing::kIQ3_XXS || packing_ == Packing::kIQ3_S;
    for (int64_t i = 0; i < codebook_points(packing_); ++i) {
      int point = 0;
      for (int d = 0; d < 16; d += few ? 4 : 2)
        point |= static_cast<int>(between(0, few ? 7 : 2)) << d;
      codebook_[i] = static_cast<uint16_t>(point);
    }
    const int64_t odd = chance(0.2) ? between(0, blocks() * columns_ - 1) : -1;
    for (int64_t i = 0; i < blocks() * columns_; ++i)
      if (bytes_of(scale_type_) == 1)
        scales_[i] = some_byte_scale(scale_type_, i == odd);
      else
        put(scales_, i, i == odd ? strange()
                                 : std::exp(normal()) * (chance(0.1) ? -1 : 1));
    if (offset_ == Offset::kZeroPoint)
      for (int64_t i = 0; i < blocks() * n_; ++i)
        offsets_[i] =
            static_cast<uint8_t>(between(0, chance(0.1) ? 255 : (1 << bits()) - 1));
    else
      for (int64_t i = 0; i < blocks() * n_; ++i)
        put(offsets_, i, -3 * std::abs(normal()));
    // Nearly all numbers are zero, so that what is not is small beside the codes.
    if (in_bytes_ && offset_ == Offset::kZeroPoint && chance(0.5))
      for (int64_t i = 0; i < units_ * n_; ++i)
        if (chance(0.9)) {
          const int64_t g = 2 * (i / n_) / smaller(block_, k_);
          codes_[i] = static_cast<uint8_t>(17 * (offsets_[g * n_ + i % n_] & 15));
        }
    if (!is_long()) return;
    // Numbers that are all the same.
    const size_t size = offset_ == Offset::kZeroPoint ? 1 : bytes_of(scale_type_);
    repeat(codes_, 1);
    repeat(scales_, static_cast<size_t>(bytes_of(scale_type_)));
    repeat(offsets_, size);
  }

  Blocks weight() const {
    return {packing_,
            codes_.data(),
            order(units_ * unit_bytes()),
            n_,
            k_,
            smaller(block_, k_),
            InBytes::of(packing_, block_, k_),
            {scale_type_, scales_.data(), order(blocks()), columns_ == 1,
             factor_of(scale_type_, factor_)},
            gguf_ ? offset_of_gguf() : offset_,
            offset_ == Offset::kZeroPoint ? offsets_.data() : nullptr,
            order(blocks()),
            {scale_type_, offsets_.data(), order(blocks()), false, {}},
            point_type_,
            gguf_ ? base_of_gguf() : static_cast<int32_t>(base_),
            points_.data(),
            codebook_.data()};
  }

  // The number `k` of the row `i`.
  double number(int64_t i, int64_t k) const {
    const int64_t unit = k / unit_codes(), first = unit * unit_bytes();
    uint8_t bytes[256];
    for (int64_t b = 0; b < unit_bytes(); ++b) 
      bytes[b] = codes_[place(first + b, i, units_ * unit_bytes())];
    if (gguf_)
      return GGUFBlock{packing_, bytes, points_.data(), codebook_.data()}.number(
          k % unit_codes());
    const int64_t start = k % unit_codes() * bits();
    int code = bytes[start / 8] >> start % 8;
    if (start % 8 + bits() > 8) code |= bytes[start / 8 + 1] << (8 - start % 8);
    code &= (1 << bits()) - 1;
    if (packing_ == Packing::kTrits) {
      code = bytes[0];
      for (int64_t d = 0; d < k % 5; ++d) code /= 3;
      code %= 3;
    }
    const int64_t g = k / smaller(block_, k_);
    const int64_t at = place(g, i, blocks());
    const double scale = get(scales_, columns_ == 1 ? g : at);
    const double less = offset_ == Offset::kZeroPoint ? offsets_[at] : 0;
    const double low = offset_ == Offset::kMinimum ? get(offsets_, at) : 0;
    // As formats decode: rounded once, since XLA multiplies and adds at a time.
    return static_cast<float>((point(code) - less) * scale + low);
  }

  // Whether all terms of a sum are the same, and there are so many that errors of
  // rounding would build up.
  bool is_long() const { return long_ != Long::kNot; }

  // Some of the inputs are not what one would like.
  Buffer<float> inputs(int64_t columns) const {
    auto x = buffer(rows_ * columns);
    if (is_long()) {
      for (int64_t i = 0; i < rows_ * columns; ++i) x[i] = 1.3f;
      return x;
    }
    for (int64_t m = 0; m < rows_; ++m) {
      const float sizes[] = {0, 1e30f, 1e-30f, 1e-36f, 1e-41f};
      const float size = chance(0.2) ? sizes[between(0, 4)] : 1;
      float* const row = x.data() + m * columns;
      for (int64_t i = 0; i < columns; ++i) row[i] = size * normal();
      if (chance(0.3)) {
        const float factor = chance(0.5) ? 1e6f : 100;
        const double share = chance(0.7) ? 0.02 : 0.1;
        for (int64_t i = 0; i < columns; ++i)
          if (chance(share)) row[i] *= factor;
      }
      if (chance(0.1))
        for (int64_t i = between(1, 3); i > 0; --i)
          row[between(0, columns - 1)] = strange();
    }
    return x;
  }
  Place place() const { return place_; }
  Buffer<float> buffer(int64_t size) const { return Buffer<float>(size, place_); }

  int64_t rows() const { return rows_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // What points of a table are multiples of.
  float unit() const { return unit_; }
  // Whether bfloat16 has all points.
  bool are_narrow() const {
    return point_type_ == PointType::kIntegers || unit_ > 1.0f / 100;
  }

  void print() const {
    std::printf(
        "packing %d, rows %" PRId64 ", n %" PRId64 ", panels %d, k %" PRId64
        ", block %" PRId64 ", scales %" PRId64 " of type "
        "%d, factor %g, offset %d, points %d, place %d\n",
        static_cast<int>(packing_), rows_, n_, in_panels_, k_, block_, columns_,
        static_cast<int>(scale_type_), double{factor_}, static_cast<int>(offset_),
        static_cast<int>(point_type_), static_cast<int>(place_));
  }

 private:
  // Which sums are long: none, those of the codes of a row, or those of all rows.
  enum class Long { kNot, kCodes, kRows };

  static Long some_long() {
    if (chance(0.98)) return Long::kNot;
    return chance(0.5) ? Long::kCodes : Long::kRows;
  }
  // Copies the first `size` bytes to all others.
  static void repeat(Buffer<uint8_t>& of, size_t size) {
    for (size_t i = size; i < of.size(); ++i)
      of[static_cast<int64_t>(i)] = of[static_cast<int64_t>(i % size)];
  }

  // Blocks have a multiple of 16 codes, and end with a byte, or with four of its codes.
  int64_t some_step() const {
    return packing_ == Packing::kTrits && in_bytes_ ? 80 : 16;
  }
  // (At least: trits have fewer than two.)
  int bits() const {
    return gguf_ ? 4 : packing_ == Packing::kTrits ? 2 : static_cast<int>(packing_);
  }
  int64_t unit_codes() const {
    return gguf_                         ? GGUFBlock::codes(packing_)
           : packing_ == Packing::kTrits ? 5
           : bits() == 8     ? 1
           : bits() == 4     ? 2
           : bits() % 2 == 0 ? 4
                             : 8;
  }
  int64_t unit_bytes() const {
    return gguf_                         ? GGUFBlock::bytes(packing_)
           : packing_ == Packing::kTrits ? 1
                                         : unit_codes() * bits() / 8;
  }
  // Where the number `j` of row `i` is, of `numbers` in each row: in panels of 64 rows,
  // one after another, or in one of all rows.
  int64_t place(int64_t j, int64_t i, int64_t numbers) const {
    const int64_t each = in_panels_ ? 64 : n_;
    return (i / each * numbers + j) * each + i % each;
  }
  RowOrder order(int64_t numbers) const {
    return in_panels_ ? RowOrder::in_panels(numbers) : RowOrder::side_by_side(n_);
  }
  static int64_t some_rows(bool in_panels, Long of) {
    const int64_t n = of == Long::kCodes ? between(1, 30)
                      : chance(0.05)     ? between(500, 2500)
                                         : between(1, 150);
    return in_panels ? divided_up(n, 64) * 64 : n;
  }

  int64_t blocks() const { return gguf_ ? 1 : divided_up(k_, smaller(block_, k_)); }

  double point(int code) const {
    switch (point_type_) {
      case PointType::kIntegers: return code - static_cast<double>(base_);
      case PointType::kTable: return points_[code];
      case PointType::kSigned: return static_cast<int8_t>(code);
      case PointType::kE5M2: return float16_to_double(static_cast<uint16_t>(code << 8));
      default: return e4m3_to_double(code);
    }
  }

  Offset offset_of_gguf() const {
    if (codebook_points(packing_) > 0) return Offset::kNone;
    switch (packing_) {
      case Packing::kQ5_0:
      case Packing::kQ3_K:
      case Packing::kQ6_K:
      case Packing::kIQ4_XS: return Offset::kNone;
      default: return Offset::kMinimum;
    }
  }
  int32_t base_of_gguf() const {
    return packing_ == Packing::kQ5_0   ? 16
           : packing_ == Packing::kQ3_K ? 4
           : packing_ == Packing::kQ6_K ? 32
                                        : 0;
  }

  Packing some_packing() const {
    const Packing whole[] = {Packing::kTrits, Packing::kBits1, Packing::kBits2,
                             Packing::kBits4, Packing::kBits8};
    if (in_bytes_) return whole[between(0, 4)];
    const Packing gguf[] = {
        Packing::kQ4_1,   Packing::kQ5_0,  Packing::kQ5_1,   Packing::kQ2_K,
        Packing::kQ3_K,   Packing::kQ4_K,  Packing::kQ5_K,   Packing::kQ6_K,
        Packing::kIQ2_XXS, Packing::kIQ2_XS, Packing::kIQ3_XXS, Packing::kIQ1_S,
        Packing::kIQ3_S,  Packing::kIQ2_S, Packing::kIQ4_XS, Packing::kIQ1_M};
    return chance(0.5) ? static_cast<Packing>(between(0, 8)) : gguf[between(0, 15)];
  }
  PointType some_points() const {
    if (packing_ == Packing::kIQ4_XS) return PointType::kTable;
    if (in_bytes_ && packing_ == Packing::kBits8) return PointType::kSigned;
    if (gguf_ || chance(0.6)) return PointType::kIntegers;
    return static_cast<PointType>(packing_ == Packing::kBits8 ? between(1, 4) : 1);
  }
  Offset some_offset() const {
    const auto found = static_cast<Offset>(between(0, 2));
    const bool zero = found == Offset::kZeroPoint;
    if (gguf_ || (zero && point_type_ != PointType::kIntegers)) return Offset::kNone;
    if (in_bytes_ && !(zero && packing_ == Packing::kBits4)) return Offset::kNone;
    // (Minima have no byte.)
    const bool bytes = bytes_of(scale_type_) == 1;
    return bytes && found == Offset::kMinimum ? Offset::kNone : found;
  }

  void put(const Buffer<uint8_t>& to, int64_t i, float x) const {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t wide = static_cast<uint16_t>(bits >> 16);
    // The sign, an exponent near 1, and some mantissa.
    const uint16_t half = static_cast<uint16_t>(
        (wide & 0x8000) | between(12, 18) << 10 | (wide & 0x7f) << 3);
    if (scale_type_ == ScaleType::kFloat32) std::memcpy(to.data() + 4 * i, &bits, 4);
    if (scale_type_ == ScaleType::kBfloat16) std::memcpy(to.data() + 2 * i, &wide, 2);
    if (scale_type_ == ScaleType::kFloat16) std::memcpy(to.data() + 2 * i, &half, 2);
  }
  double get(const Buffer<uint8_t>& from, int64_t i) const {
    if (bytes_of(scale_type_) == 1)
      return byte_scale_to_double(scale_type_, from[i], factor_);
    float wide;
    uint16_t narrow;
    std::memcpy(&narrow, from.data() + 2 * i, 2);
    if (scale_type_ == ScaleType::kFloat16) return float16_to_double(narrow);
    if (scale_type_ == ScaleType::kBfloat16) return bfloat16_to_double(narrow);
    std::memcpy(&wide, from.data() + 4 * i, 4);
    return wide;
  }

  Long long_;
  bool in_bytes_;
  Packing packing_;
  bool gguf_, in_panels_;
  int64_t n_, k_, block_, rows_, units_;
  Place place_;
  ScaleType scale_type_;
  float factor_;
  PointType point_type_;
  Offset offset_;
  int64_t base_, columns_;
  float unit_;
  Buffer<uint8_t> codes_, scales_, offsets_;
  Buffer<float> points_;
  Buffer<uint16_t> codebook_;
};

}  // namespace
}  // namespace eqquant
