// Random numbers, and buffers of exactly their size.
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

}  // namespace
}  // namespace eqquant
