// Random weights and inputs, in buffers of exactly their size.
//
// Sanitizers do not see what instructions with masks read, so some of the buffers end
// where a page begins that nothing may touch, and some begin where one ends.
#pragma once

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "pages.h"
#include "products/kernels.h"

namespace eqquant {
namespace {

std::mt19937_64 random_bits;

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

bool chance(double p) { return std::bernoulli_distribution(p)(random_bits); }

float normal() { return std::normal_distribution<float>()(random_bits); }

// What it takes for a sum to go wrong.
float strange() {
  const float some[] = {NAN, INFINITY, -INFINITY, 0, 1e30f, -1e36f, 1e-30f, 1e-40f};
  return some[between(0, 7)];
}

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
      const size_t page = page_size();
      const size_t inside = (bytes + page - 1) / page * page;
      mapped_ = inside + 2 * page;
      char* all = guarded_pages(mapped_);
      // (Emulators refuse to open nothing.)
      if (inside > 0 && !open_pages(all + page, inside)) std::abort();
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
    if (mapped_ != 0) free_pages(start_, mapped_);
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
  if (!std::isfinite(x)) return x;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bfloat16_to_double(
      static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

double float16_to_double(uint16_t bits) {
  const int exponent = bits >> 10 & 31, rest = bits & 0x3ff;
  const double size = exponent == 31  ? (rest == 0 ? INFINITY : NAN)
                      : exponent == 0 ? std::ldexp(rest, -24)
                                      : std::ldexp(1024 + rest, exponent - 25);
  return bits >> 15 ? -size : size;
}

double e4m3_to_double(int code) {
  if ((code & 127) == 127) return NAN;
  const int exponent = code >> 3 & 15, rest = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(rest, -9) : std::ldexp(8 + rest, exponent - 10);
  return code >> 7 ? -size : size;
}

// A scale of one byte, and what it stands for with the factor of its matrix: of numbers
// that do not overflow.
uint8_t some_byte_scale(ScaleType type, bool strange) {
  const int powers[] = {0, 1, 227, 255};
  const int floats[] = {0, 0x80, 1, 0x87, 0x7e, 0x7f, 0xff};
  if (type == ScaleType::kE8M0)
    return static_cast<uint8_t>(strange ? powers[between(0, 3)] : between(120, 134));
  return static_cast<uint8_t>(strange ? floats[between(0, 6)]
                                      : between(0, 1) << 7 | between(0x20, 0x60));
}
double byte_scale_to_double(ScaleType type, uint8_t byte, float factor) {
  if (type == ScaleType::kE8M0) return byte == 255 ? NAN : std::ldexp(1, byte - 127);
  const double x = e4m3_to_double(byte);
  return static_cast<float>(type == ScaleType::kE4M3 ? x * factor : x / factor);
}
float some_factor(ScaleType type) {
  if (chance(0.9)) return std::exp(normal());
  const bool inverse = type == ScaleType::kE4M3Inverse;
  const float some[] = {NAN, INFINITY, -INFINITY, 0, inverse ? -1e-30f : -1e30f,
                        inverse ? 3e38f : 1e-40f};
  return some[between(0, 5)];
}

// What of a weight is rounded to bfloat16.
enum class Rounded { kNothing, kPoints, kNumbers };

// A random weight: as kernels take it, and the parts of its numbers in double
// precision.
class Case {
 public:
  Case(Codes kind, bool integers)
      : long_(some_long()),
        kind_(kind),
        per_(codes_per_byte(kind)),
        n_(long_ == Long::kRows    ? between(5000, 20000)
           : long_ == Long::kCodes ? between(1, 30)
                                   : some_n()),
        bytes_(long_ == Long::kRows    ? between(1, 20)
               : long_ == Long::kCodes ? between(5000, 20000) / per_
               : chance(0.2)           ? between(1, 1200)
                                       : between(1, 90)),
        block_(some_block(integers)),
        blocks_(divided_up(bytes_, block_)),
        rows_(long_ != Long::kNot ? between(1, 6)
              : chance(0.3)       ? 1
                                  : between(1, chance(0.9) ? 40 : 100)),
        columns_(chance(0.2) ? 1 : n_),
        scale_type_(static_cast<ScaleType>(between(0, 5))),
        factor_(some_factor(scale_type_)),
        used_(chance(0.2) ? between(1, per_) : per_),
        k_(used_ * bytes_ - (chance(0.2) ? between(0, used_ - 1) : 0)),
        place_(static_cast<Place>(between(0, 2))),
        codes_(bytes_ * n_, place_),
        scale32_(blocks_ * columns_, place_),
        scale16_(blocks_ * columns_, place_),
        scale8_(blocks_ * columns_, place_),
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
      scale8_[i] = some_byte_scale(scale_type_, false);
    }
    if (long_ != Long::kNot) {
      // Numbers that are all the same, but for the digits of a byte.
      repeat(codes_);
      repeat(zero_);
      repeat(scale32_);
      repeat(scale16_);
      repeat(scale8_);
      return;
    }
    if (chance(0.3))
      for (int64_t i = between(1, 3); i > 0; --i) set_strange_scale();
  }

  Weight weight() const {
    const int64_t size = bytes_of(scale_type_);
    const void* const scale = size == 4   ? static_cast<const void*>(scale32_.data())
                              : size == 2 ? static_cast<const void*>(scale16_.data())
                                          : static_cast<const void*>(scale8_.data());
    return {kind_,
            codes_.data(),
            bytes_,
            n_,
            block_,
            blocks_,
            scale_type_,
            scale,
            RowOrder::side_by_side(columns_),
            columns_ == 1,
            factor_of(scale_type_, factor_),
            has_zero_ ? zero_.data() : nullptr,
            points_.data(),
            static_cast<int32_t>(offset_),
            used_,
            k_};
  }

  // Whether the digit `k` of a row is a code.
  bool is_code(int64_t k) const {
    return k % per_ < used_ && k / per_ * used_ + k % per_ < k_;
  }

  // The number `k` of the row `i`.
  double number(int64_t i, int64_t k, Rounded rounded) const {
    if (!is_code(k)) return 0;
    const double found = point(i, k, rounded == Rounded::kPoints) * scale(i, k);
    return rounded == Rounded::kNumbers ? rounded_to_bfloat16(static_cast<float>(found))
                                        : found;
  }

  template <class T>
  Buffer<T> buffer(int64_t size) const {
    return Buffer<T>(size, place_);
  }

  // Whether all terms of a sum are alike, and there are so many that errors of rounding
  // would build up.
  bool is_long() const { return long_ != Long::kNot; }

  // Some rows are zero, huge or tiny, and some have numbers that are much larger than
  // the others, or are not finite.
  Buffer<float> inputs(int64_t columns) const {
    auto x = buffer<float>(rows_ * columns);
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

  // Inputs for all digits, with zeros for those that are not codes.
  Buffer<float> inputs_of_codes() const {
    auto x = inputs(k());
    for (int64_t i = 0; i < rows_ * k(); ++i)
      if (!is_code(i % k())) x[i] = 0;
    return x;
  }

  int64_t rows() const { return rows_; }
  int64_t n() const { return n_; }
  int64_t k() const { return per_ * bytes_; }
  bool for_bfloat16() const { return kind_ == Codes::kNibbles && !has_zero_; }

  void print() const {
    std::printf(
        "rows %" PRId64 ", n %" PRId64 ", bytes %" PRId64 ", block %" PRId64
        ", kind %d, scales %" PRId64 " of type %d, "
        "factor %g, zero-points %d, place %d\n",
        rows_, n_, bytes_, block_, static_cast<int>(kind_), columns_,
        static_cast<int>(scale_type_), double{factor_}, has_zero_,
        static_cast<int>(place_));
  }

 private:
  // Which sums are long: none, those of the codes of a row, or those of all rows.
  enum class Long { kNot, kCodes, kRows };

  static Long some_long() {
    if (chance(0.98)) return Long::kNot;
    return chance(0.5) ? Long::kCodes : Long::kRows;
  }
  template <class T>
  static void repeat(Buffer<T>& of) {
    for (size_t i = 1; i < of.size(); ++i) of[static_cast<int64_t>(i)] = of[0];
  }

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

  void set_strange_scale() {
    const int64_t at = between(0, blocks_ * columns_ - 1);
    const float found = strange();
    std::memcpy(&scale32_[at], &found, 4);
    const uint16_t halves[] = {0x7e00, 0x7c00, 0xfc00, 0, 1, 0x8123, 0x7bff};
    uint32_t bits;
    std::memcpy(&bits, &found, 4);
    scale16_[at] = scale_type_ == ScaleType::kFloat16
                       ? halves[between(0, 6)]
                       : static_cast<uint16_t>(bits >> 16);
    scale8_[at] = some_byte_scale(scale_type_, true);
  }

  double scale(int64_t i, int64_t k) const {
    const int64_t at = k / per_ / block_ * columns_ + (columns_ == 1 ? 0 : i);
    if (bytes_of(scale_type_) == 1)
      return byte_scale_to_double(scale_type_, scale8_[at], factor_);
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

  Long long_;
  Codes kind_;
  int64_t per_, n_, bytes_, block_, blocks_, rows_, columns_;
  ScaleType scale_type_;
  float factor_;
  int64_t used_, k_;
  Place place_;
  Buffer<uint8_t> codes_;
  Buffer<uint32_t> scale32_;
  Buffer<uint16_t> scale16_;
  Buffer<uint8_t> scale8_, zero_;
  Buffer<float> points_;
  bool has_zero_;
  int64_t offset_;
};

}  // namespace
}  // namespace eqquant
