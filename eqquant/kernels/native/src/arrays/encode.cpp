// Tiles of 64 rows and one block are encoded in a cache, eight rows at once: numbers
// that are in the same place of each block lie next to each other.
#include "arrays/encode.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "arrays/search.h"

namespace eqquant {
namespace {

constexpr int64_t kMostBlock = 256;
constexpr int64_t kMostParts = 16;
// Codes, two integers for each part, and two scales.
constexpr int64_t kMostBytes = kMostBlock + 2 * kMostParts + 4;

struct Tile {
  alignas(64) float numbers[kMostBlock][kRows];
  alignas(64) uint8_t bytes[kMostBytes][kRows];
  alignas(64) float scale[kMostParts][kRows], below[kMostParts][kRows];
};

// Treats subnormal numbers as zeros, as XLA does.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

template <NumberType type>
Floats load(const uint8_t* p) {
  if constexpr (type == NumberType::kFloat32)
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  const auto half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (type == NumberType::kFloat16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// The first `count` of eight numbers, and the last of those again.
template <NumberType type>
Floats load(const uint8_t* p, int64_t count) {
  constexpr int64_t size = type == NumberType::kFloat32 ? 4 : 2;
  if (count >= kLanes) return load<type>(p);
  uint8_t copy[size * kLanes];
  for (int64_t i = 0; i < kLanes; ++i)
    std::memcpy(copy + i * size, p + std::min(i, count - 1) * size, size);
  return load<type>(copy);
}

void transpose(Floats* x) {
  Floats a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + j + 2], 0x44);
      b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// The numbers of block `g`, of `rows` rows from row `row` of a matrix on.
template <NumberType type>
void load_tile(const Encoding& e, int64_t matrix, int64_t g, int64_t row, int64_t rows,
               Tile& tile) {
  constexpr int64_t size = type == NumberType::kFloat32 ? 4 : 2;
  const uint8_t* from =
      static_cast<const uint8_t*>(e.numbers) + matrix * e.rows * e.size * size;
  const int64_t start = g * e.block, count = std::min(e.block, e.size - start);
  for (int64_t j = 0; j < rows; j += kLanes) {
    const int64_t some = std::min<int64_t>(rows - j, kLanes);
    if (e.across) {
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* p = from + ((start + i) * e.rows + row + j) * size;
        _mm256_store_ps(tile.numbers[i] + j, load<type>(p, some));
      }
      continue;
    }
    for (int64_t i = 0; i < count; i += 8) {
      Floats x[8];
      for (int r = 0; r < 8; ++r) {
        const int64_t at = row + j + std::min<int64_t>(r, some - 1);
        x[r] = load<type>(from + (at * e.size + start + i) * size, count - i);
      }
      transpose(x);
      // (Blocks are of whole eights, so that there is room for all.)
      for (int r = 0; r < 8; ++r) _mm256_store_ps(tile.numbers[i + r] + j, x[r]);
    }
  }
  for (int64_t i = count; i < e.block; ++i) {
    if (e.repeats)
      std::memcpy(tile.numbers[i], tile.numbers[count - 1], sizeof(tile.numbers[i]));
    else
      std::memset(tile.numbers[i], 0, sizeof(tile.numbers[i]));
  }
}

// The lowest bytes of eight integers.
void store_bytes(__m256i x, uint8_t* to) {
  x = _mm256_and_si256(x, _mm256_set1_epi32(255));
  const auto pairs = _mm_packs_epi32(_mm256_castsi256_si128(x),
                                     _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
}

void store_integers(Floats x, int32_t zero, uint8_t* to) {
  store_bytes(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(zero)), to);
}

// A scale as the bits of a float16: `to_bits` of `formats`.
__m128i to_half(Floats x) {
  const auto bits = _mm256_castps_si256(magnitude(x));
  auto exponent = _mm256_srli_epi32(bits, 23);
  exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(127 - 14));
  exponent = _mm256_min_epi32(exponent, _mm256_set1_epi32(127 + 16));
  exponent = _mm256_sub_epi32(exponent, _mm256_set1_epi32(10));
  const Floats unit = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  const Floats exact = _mm256_div_ps(magnitude(x), unit);
  Floats whole = rounded(exact);
  const Floats less = above(product(all(0.999f), exact), whole);
  whole = product(where(less, sum(whole, all(1.0f)), whole), unit);
  // The sign, and that of a zero.
  whole = _mm256_or_ps(whole, _mm256_and_ps(all(-0.0f), x));
  return _mm256_cvtps_ph(whole, _MM_FROUND_TO_NEAREST_INT);
}

// The two bytes of eight numbers in float16. Returns the numbers.
Floats store_half(__m128i half, uint8_t (*to)[kRows], int64_t j) {
  alignas(16) uint16_t bits[kLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(bits), half);
  for (int i = 0; i < kLanes; ++i) {
    to[0][j + i] = static_cast<uint8_t>(bits[i]);
    to[1][j + i] = static_cast<uint8_t>(bits[i] >> 8);
  }
  return _mm256_cvtph_ps(half);
}

// Encodes eight rows, from row `j` of a tile on.
class Lanes {
 public:
  Lanes(const Encoding& e, Tile& tile, int64_t j)
      : e_(e),
        tile_(tile),
        j_(j),
        parts_(e.block / e.part),
        steps_(tile.bytes + e.block),
        halves_(tile.bytes + e.block + 2 * parts_) {}

  void encode() {
    switch (e_.search) {
      case Search::kIntegers: return multiples<16>([this](Floats x) {
        return clipped(rounded(x), -half_codes(), half_codes() - 1);
      });
      case Search::kPoints: return points();
      case Search::kRanges: return ranges<32, false>();
      case Search::kAbsoluteRanges: return ranges<16, true>();
    }
  }

 private:
  float half_codes() const { return static_cast<float>(e_.codes / 2); }
  const float* numbers(int64_t i) const { return tile_.numbers[i] + j_; }

  template <int part, class Nearest>
  void search(const Nearest& nearest) {
    for (int64_t g = 0; g < parts_; ++g)
      _mm256_store_ps(tile_.scale[g] + j_,
                      best_multiple<part>(numbers(g * part), e_, nearest));
  }

  // The scale of each part, as it will be read.
  template <class Then>
  void share(const Then& then) {
    const float half = static_cast<float>(e_.steps / 2);
    const Floats largest = signed_largest(tile_.scale[0] + j_, parts_, kRows);
    const Floats unit =
        store_half(to_half(_mm256_div_ps(largest, all(-half))), halves_, j_);
    const Floats inverse = reciprocal(unit);
    for (int64_t g = 0; g < parts_; ++g) {
      const Floats scale = _mm256_load_ps(tile_.scale[g] + j_);
      const Floats step = clipped(rounded(product(scale, inverse)), -half, half - 1);
      store_integers(step, e_.zero, steps_[g] + j_);
      then(g, product(unit, step));
    }
  }

  template <int part, class Nearest>
  void multiples(const Nearest& nearest) {
    search<part>(nearest);
    share([&](int64_t g, Floats scale) {
      const Floats inverse = reciprocal(scale);
      for (int64_t i = g * part; i < (g + 1) * part; ++i) {
        const Floats code = nearest(product(_mm256_load_ps(numbers(i)), inverse));
        store_integers(code, e_.codes / 2, tile_.bytes[i] + j_);
      }
    });
  }

  void points() {
    const Points points(e_.points);
    search<32>([&](Floats x) EQQUANT_INLINE { return points.nearest(x); });
    const auto write = [&](int64_t g, Floats scale) {
      const Floats inverse = reciprocal(scale);
      for (int64_t i = g * 32; i < (g + 1) * 32; ++i) {
        const Floats x = product(_mm256_load_ps(numbers(i)), inverse);
        store_bytes(points.codes(x), tile_.bytes[i] + j_);
      }
    };
    if (e_.steps != 0) return share(write);
    const Floats scale = _mm256_load_ps(tile_.scale[0] + j_);
    store_half(_mm256_cvtps_ph(scale, _MM_FROUND_TO_NEAREST_INT), halves_, j_);
    write(0, scale);
  }

  // Scales that are not negative, as integers times one in float16.
  Floats share_range(const float (*scale)[kRows], uint8_t (*half)[kRows],
                     uint8_t (*steps)[kRows]) {
    const float last = static_cast<float>(e_.steps - 1);
    Floats largest = _mm256_load_ps(scale[0] + j_);
    for (int64_t g = 1; g < parts_; ++g)
      largest = most(largest, _mm256_load_ps(scale[g] + j_));
    const Floats unit =
        store_half(to_half(product(largest, all(1.0f / last))), half, j_);
    const Floats inverse = reciprocal(unit);
    for (int64_t g = 0; g < parts_; ++g) {
      const Floats step = product(_mm256_load_ps(scale[g] + j_), inverse);
      store_integers(clipped(rounded(step), 0, last), 0, steps[g] + j_);
    }
    return unit;
  }

  Floats step(const uint8_t* steps) const {
    const auto* from = reinterpret_cast<const __m128i*>(steps + j_);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from)));
  }

  template <int part, bool absolute>
  void ranges() {
    for (int64_t g = 0; g < parts_; ++g) {
      const Range found = best_range<part, absolute>(numbers(g * part), e_);
      _mm256_store_ps(tile_.scale[g] + j_, found.scale);
      _mm256_store_ps(tile_.below[g] + j_, found.below);
    }
    const Floats unit = share_range(tile_.scale, halves_, steps_);
    const float last = static_cast<float>(e_.codes - 1);
    const Floats zero = _mm256_setzero_ps();
    for (int64_t g = 0; g < parts_; ++g) {
      // A part whose scale becomes zero is constant: the middle of its range.
      float* const at = tile_.below[g] + j_;
      const Floats below = _mm256_load_ps(at);
      const Floats half = product(_mm256_load_ps(tile_.scale[g] + j_), all(last / 2));
      const Floats middle = most(minus(below, half), zero);
      _mm256_store_ps(at, where(equal(step(steps_[g]), zero), middle, below));
    }
    uint8_t(*const lows)[kRows] = steps_ + parts_;
    const Floats low_unit = share_range(tile_.below, halves_ + 2, lows);
    for (int64_t g = 0; g < parts_; ++g) {
      const Floats inverse = reciprocal(product(unit, step(steps_[g])));
      const Floats low = product(low_unit, step(lows[g]));
      for (int64_t i = g * part; i < (g + 1) * part; ++i) {
        const Floats x = product(sum(_mm256_load_ps(numbers(i)), low), inverse);
        store_integers(clipped(rounded(x), 0, last), 0, tile_.bytes[i] + j_);
      }
    }
  }

  const Encoding& e_;
  Tile& tile_;
  const int64_t j_, parts_;
  uint8_t (*const steps_)[kRows];
  uint8_t (*const halves_)[kRows];
};

// The bytes of blocks, of `rows` rows.
void pack(const Encoding& e, const Tile& tile, int64_t rows, uint8_t* to) {
  const StoredBits* bits = e.bits;
  const StoredBits* const end = bits + e.number;
  for (int64_t byte = 0; byte < e.bytes; ++byte, to += e.rows) {
    __m256i found[2] = {};
    for (; bits != end && bits->byte == byte; ++bits) {
      const auto* from = reinterpret_cast<const __m256i*>(tile.bytes[bits->from]);
      const auto mask = _mm256_set1_epi8(static_cast<char>((1 << bits->number) - 1));
      for (int i = 0; i < 2; ++i) {
        auto x = _mm256_load_si256(from + i);
        x = _mm256_srl_epi16(x, _mm_cvtsi32_si128(bits->at));
        x = _mm256_and_si256(x, mask);
        x = _mm256_sll_epi16(x, _mm_cvtsi32_si128(bits->start));
        found[i] = _mm256_or_si256(found[i], x);
      }
    }
    std::memcpy(to, found, static_cast<size_t>(rows));
  }
}

}  // namespace

int64_t encoding_tasks(const Encoding& e) {
  return e.matrices * divided_up(e.size, e.block) * divided_up(e.rows, kRows);
}

bool encode(const Encoding& e, int64_t task) {
  const std::unique_ptr<Tile> tile(new (std::nothrow) Tile);
  if (tile == nullptr) return false;
  const WithoutSubnormals guard;
  const int64_t blocks = divided_up(e.size, e.block);
  const int64_t tiles = divided_up(e.rows, kRows);
  // Tiles that follow one another in memory are encoded one after another.
  const int64_t row = (e.across ? task % tiles : task / blocks % tiles) * kRows;
  const int64_t g = e.across ? task / tiles % blocks : task % blocks;
  const int64_t matrix = task / tiles / blocks, rows = smaller(e.rows - row, kRows);
  switch (e.type) {
    case NumberType::kFloat32:
      load_tile<NumberType::kFloat32>(e, matrix, g, row, rows, *tile);
      break;
    case NumberType::kBfloat16:
      load_tile<NumberType::kBfloat16>(e, matrix, g, row, rows, *tile);
      break;
    case NumberType::kFloat16:
      load_tile<NumberType::kFloat16>(e, matrix, g, row, rows, *tile);
      break;
  }
  for (int64_t j = 0; j < rows; j += kLanes) Lanes(e, *tile, j).encode();
  pack(e, *tile, rows, e.blocks + (matrix * blocks + g) * e.bytes * e.rows + row);
  return true;
}

}  // namespace eqquant
