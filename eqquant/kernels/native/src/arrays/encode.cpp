// Tiles of 64 rows and one block are encoded in a cache, a vector of rows at a time:
// numbers in the same place of each block lie next to each other.
#include "arrays/encode.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "arrays/search.h"

namespace eqquant {
namespace {

using B = V::Bytes;

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
  WithoutSubnormals() : before_(V::control()) {
    V::set_control(before_ | V::no_subnormals);
  }
  ~WithoutSubnormals() { V::set_control(before_); }

 private:
  V::Control before_;
};

template <NumberType type>
Floats load(const uint8_t* p) {
  if constexpr (type == NumberType::kFloat32)
    return V::load(reinterpret_cast<const float*>(p));
  else
    return V::load_16_bits(reinterpret_cast<const uint16_t*>(p),
                           type == NumberType::kFloat16);
}

// Loads the first `count` numbers of a vector, and repeats the last of them.
template <NumberType type>
Floats load(const uint8_t* p, int64_t count) {
  constexpr int64_t size = type == NumberType::kFloat32 ? 4 : 2;
  if (count >= kLanes) return load<type>(p);
  uint8_t copy[size * kLanes];
  for (int64_t i = 0; i < kLanes; ++i)
    std::memcpy(copy + i * size, p + std::min(i, count - 1) * size, size);
  return load<type>(copy);
}

// Loads the numbers of block `g`, of `rows` rows from row `row` of a matrix on.
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
        V::store(tile.numbers[i] + j, load<type>(p, some));
      }
      continue;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats x[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const int64_t at = row + j + std::min<int64_t>(r, some - 1);
        x[r] = load<type>(from + (at * e.size + start + i) * size, count - i);
      }
      V::transpose(x);
      // (Blocks consist of whole vectors, so there is room for all.)
      for (int r = 0; r < kLanes; ++r) V::store(tile.numbers[i + r] + j, x[r]);
    }
  }
  for (int64_t i = count; i < e.block; ++i) {
    if (e.repeats)
      std::memcpy(tile.numbers[i], tile.numbers[count - 1], sizeof(tile.numbers[i]));
    else
      std::memset(tile.numbers[i], 0, sizeof(tile.numbers[i]));
  }
}

void store_integers(Floats x, int32_t zero, uint8_t* to) {
  V::store_low_bytes(to, V::add(V::to_ints(x), V::ints(zero)));
}

// Rounds a scale to float16: `to_bits` of `formats`.
Floats to_half(Floats x) {
  auto exponent = V::right<23>(V::as_ints(magnitude(x)));
  exponent = V::max(exponent, V::ints(127 - 14));
  exponent = V::min(exponent, V::ints(127 + 16));
  exponent = V::minus(exponent, V::ints(10));
  const Floats unit = V::as_floats(V::left<23>(exponent));
  const Floats exact = V::div(magnitude(x), unit);
  Floats whole = rounded(exact);
  const Mask less = above(product(all(0.999f), exact), whole);
  whole = product(where(less, sum(whole, all(1.0f)), whole), unit);
  // The sign, also of a zero.
  return V::with_sign(whole, x);
}

// Stores numbers as the two bytes of float16. Returns the rounded numbers.
Floats store_half(Floats x, uint8_t (*to)[kRows], int64_t j) {
  alignas(16) uint16_t bits[kLanes];
  V::store_halves(bits, x);
  for (int i = 0; i < kLanes; ++i) {
    to[0][j + i] = static_cast<uint8_t>(bits[i]);
    to[1][j + i] = static_cast<uint8_t>(bits[i] >> 8);
  }
  return V::load_16_bits(bits, true);
}

// Encodes the rows of a vector, from row `j` of a tile on.
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
      V::store(tile_.scale[g] + j_,
               best_multiple<part>(numbers(g * part), e_, nearest));
  }

  // Calls `then` with the scale of each part as it will be decoded.
  template <class Then>
  void share(const Then& then) {
    const float half = static_cast<float>(e_.steps / 2);
    const Floats largest = signed_largest(tile_.scale[0] + j_, parts_, kRows);
    const Floats unit =
        store_half(to_half(V::div(largest, all(-half))), halves_, j_);
    const Floats inverse = reciprocal(unit);
    for (int64_t g = 0; g < parts_; ++g) {
      const Floats scale = V::load(tile_.scale[g] + j_);
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
        const Floats code = nearest(product(V::load(numbers(i)), inverse));
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
        const Floats x = product(V::load(numbers(i)), inverse);
        V::store_low_bytes(tile_.bytes[i] + j_, points.codes(x));
      }
    };
    if (e_.steps != 0) return share(write);
    const Floats scale = V::load(tile_.scale[0] + j_);
    store_half(scale, halves_, j_);
    write(0, scale);
  }

  // Encodes scales that are not negative as integers times a float16.
  Floats share_range(const float (*scale)[kRows], uint8_t (*half)[kRows],
                     uint8_t (*steps)[kRows]) {
    const float last = static_cast<float>(e_.steps - 1);
    Floats largest = V::load(scale[0] + j_);
    for (int64_t g = 1; g < parts_; ++g)
      largest = most(largest, V::load(scale[g] + j_));
    const Floats unit =
        store_half(to_half(product(largest, all(1.0f / last))), half, j_);
    const Floats inverse = reciprocal(unit);
    for (int64_t g = 0; g < parts_; ++g) {
      const Floats step = product(V::load(scale[g] + j_), inverse);
      store_integers(clipped(rounded(step), 0, last), 0, steps[g] + j_);
    }
    return unit;
  }

  Floats step(const uint8_t* steps) const {
    return V::to_floats(V::bytes<false>(steps + j_));
  }

  template <int part, bool absolute>
  void ranges() {
    for (int64_t g = 0; g < parts_; ++g) {
      const Range found = best_range<part, absolute>(numbers(g * part), e_);
      V::store(tile_.scale[g] + j_, found.scale);
      V::store(tile_.below[g] + j_, found.below);
    }
    const Floats unit = share_range(tile_.scale, halves_, steps_);
    const float last = static_cast<float>(e_.codes - 1);
    const Floats zero = V::zero();
    for (int64_t g = 0; g < parts_; ++g) {
      // A part whose scale becomes zero is constant: it decodes to the middle of its
      // range.
      float* const at = tile_.below[g] + j_;
      const Floats below = V::load(at);
      const Floats half = product(V::load(tile_.scale[g] + j_), all(last / 2));
      const Floats middle = most(minus(below, half), zero);
      V::store(at, where(V::equal(step(steps_[g]), zero), middle, below));
    }
    uint8_t(*const lows)[kRows] = steps_ + parts_;
    const Floats low_unit = share_range(tile_.below, halves_ + 2, lows);
    for (int64_t g = 0; g < parts_; ++g) {
      const Floats inverse = reciprocal(product(unit, step(steps_[g])));
      const Floats low = product(low_unit, step(lows[g]));
      for (int64_t i = g * part; i < (g + 1) * part; ++i) {
        const Floats x = product(sum(V::load(numbers(i)), low), inverse);
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

// Writes the bytes of blocks, of `rows` rows.
void pack(const Encoding& e, const Tile& tile, int64_t rows, uint8_t* to) {
  const StoredBits* bits = e.bits;
  const StoredBits* const end = bits + e.number;
  for (int64_t byte = 0; byte < e.bytes; ++byte, to += e.rows) {
    B::Vector found[kRows / B::lanes];
    for (auto& some : found) some = B::all(0);
    for (; bits != end && bits->byte == byte; ++bits) {
      const auto mask = static_cast<char>((1 << bits->number) - 1);
      for (int64_t i = 0; i < kRows / B::lanes; ++i) {
        auto x = B::load(tile.bytes[bits->from] + i * B::lanes);
        x = B::left(B::both(B::right(x, bits->at), mask), bits->start);
        found[i] = B::either(found[i], x);
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
  // The order of tasks is the order of tiles in memory.
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
