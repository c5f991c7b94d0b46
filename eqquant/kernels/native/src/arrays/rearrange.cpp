// Tiles of 64 rows are transposed in a cache, and bits are moved there, in all rows at
// once. So each store is a whole line of the cache.
#include "arrays/rearrange.h"

#include <atomic>
#include <cstring>
#include <new>

#include "arrays/threads.h"

namespace eqquant {
namespace {

using B = EQQUANT_SET::Bytes;
using Vector = B::Vector;

constexpr int64_t kRows = 64;
// The number of vectors in a line of the cache.
constexpr int64_t kVectors = 64 / B::lanes;
// The number of bytes of each row that are transposed at a time, or one larger block.
constexpr int64_t kEnough = 256;
// The least number of bytes for a thread.
constexpr int64_t kLeast = 1 << 18;

// Transposes bytes `at` to `at + 16` of a vector of rows, to lines `at` to `at + 16` of
// the tile.
void transpose_part(const uint8_t* const* rows, int64_t at, uint8_t* tile) {
  Vector a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = B::load_sixteen(rows + i, at);
  const auto shuffled = [](const Vector* from, Vector* to) {
    for (int i = 0; i < 8; ++i) {
      to[2 * i] = B::zip_low(from[i], from[i + 8]);
      to[2 * i + 1] = B::zip_high(from[i], from[i + 8]);
    }
  };
  // Four perfect shuffles of 256 bytes swap the two halves of their indices.
  shuffled(a, b);
  shuffled(b, a);
  shuffled(a, b);
  shuffled(b, a);
  for (int i = 0; i < 16; ++i) B::store(tile + (at + i) * kRows, a[i]);
}

// Transposes `size` bytes, 16 or more, of 64 rows.
void transpose(const uint8_t* const* rows, int64_t size, uint8_t* tile) {
  for (int64_t at = 0; at < size; at += 16) {
    // The last part overlaps the one before it.
    const int64_t from = at + 16 <= size ? at : size - 16;
    for (int64_t i = 0; i < kRows; i += B::lanes)
      transpose_part(rows + i, from, tile + i);
  }
}

// Returns one byte of an element, for the rows of a vector.
Vector gathered(const Field* fields, int32_t count, int32_t low, const uint8_t* tile) {
  Vector found = B::all(0);
  for (int32_t j = 0; j < count; ++j) {
    const Field& field = fields[j];
    const int32_t at = field.at - low;
    if (at < 0 || at >= 8) continue;
    Vector bits = B::load(tile + field.byte * kRows);
    if (field.number < 8) {
      bits = B::right(bits, field.start);
      bits = B::both(bits, static_cast<char>((1 << field.number) - 1));
      bits = B::left(bits, at);
    }
    found = B::either(found, bits);
  }
  return found;
}

// Stores `size` bytes of a line, past the caches if it is whole.
void store(const Vector* line, uint8_t* to, int64_t size) {
  if (size < 64) {
    std::memcpy(to, line, static_cast<size_t>(size));
    return;
  }
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 64 == 0;
  for (int64_t v = 0; v < kVectors; ++v) {
    if (aligned) B::stream(to + v * B::lanes, line[v]);
    else std::memcpy(to + v * B::lanes, line + v, sizeof(Vector));
  }
}

int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Writes the elements of a block, for up to 64 rows from row `i` on.
void write_block(const Rearranged& r, const uint8_t* tile, int64_t block, int64_t i,
                 int64_t rows) {
  const int32_t* count = r.counts;
  const Field* fields = r.fields;
  for (int64_t t = 0; t < r.number; ++t) {
    const Target& target = r.targets[t];
    uint8_t* to = target.memory + block * target.elements * target.stride +
                  i * target.size;
    for (int64_t e = 0; e < target.elements; ++e, to += target.stride) {
      Vector line[kVectors];
      if (target.size == 1) {
        for (int64_t v = 0; v < kVectors; ++v)
          line[v] = gathered(fields, *count, 0, tile + v * B::lanes);
        store(line, to, rows);
      } else {
        // Two lines, each with half of the rows.
        for (int64_t h = 0; 32 * h < rows; ++h) {
          for (int64_t v = 0; v < kVectors; v += 2) {
            const uint8_t* const some = tile + 32 * h + v / 2 * B::lanes;
            const Vector low = gathered(fields, *count, 0, some);
            B::zip(low, gathered(fields, *count, 8, some), line + v);
          }
          store(line, to + 64 * h, 2 * smaller_of(rows - 32 * h, 32));
        }
      }
      fields += *count++;
    }
  }
}

// Rearranges rows from `first` to `last`.
bool rearrange_rows(const Rearranged& r, int64_t first, int64_t last) {
  const int64_t most = r.bytes < kEnough ? kEnough / r.bytes : 1;
  const auto size = static_cast<size_t>(most * r.bytes * kRows);
  void* const memory = ::operator new(size, std::align_val_t(64), std::nothrow);
  if (memory == nullptr) return false;
  uint8_t* const tile = static_cast<uint8_t*>(memory);
  for (int64_t i = first; i < last; i += kRows) {
    const int64_t rows = smaller_of(last - i, kRows);
    for (int64_t block = 0; block < r.blocks; block += most) {
      const int64_t number = smaller_of(r.blocks - block, most);
      const uint8_t* at[kRows];
      for (int64_t j = 0; j < kRows; ++j) {
        const int64_t row = i + smaller_of(j, rows - 1);
        at[j] = r.source + r.starts[row] + block * r.bytes;
      }
      transpose(at, number * r.bytes, tile);
      for (int64_t j = 0; j < number; ++j)
        write_block(r, tile + j * r.bytes * kRows, block + j, i, rows);
    }
  }
  B::end_of_stream();
  ::operator delete(memory, std::align_val_t(64));
  return true;
}

}  // namespace

bool rearrange(const Rearranged& r, int64_t threads) {
  // A few tasks for each thread, of whole tiles.
  const int64_t row = r.blocks * r.bytes;
  int64_t least = row * r.rows / (4 * threads);
  least = least < kLeast ? kLeast : least;
  const int64_t strip = (least / (row * kRows) + 1) * kRows;
  std::atomic<bool> done{true};
  on_threads(threads, (r.rows + strip - 1) / strip, [&](int64_t i) {
    if (!rearrange_rows(r, i * strip, smaller_of((i + 1) * strip, r.rows)))
      done = false;
  });
  return done;
}

}  // namespace eqquant

EQQUANT_EXPORT int32_t eqquant_rearrange(const eqquant::Rearranged* r,
                                         int64_t threads) {
  return eqquant::rearrange(*r, threads) ? 1 : 0;
}

// Writes to each page of fresh memory: the system fills pages with zeros when they are
// first touched. If threads touched the same page at the same time, all of them would
// fill it.
EQQUANT_EXPORT void eqquant_touch(uint8_t* memory, int64_t size, int64_t threads) {
  constexpr int64_t page = 1 << 12, part = 1 << 21;
  eqquant::on_threads(threads, (size + part - 1) / part, [&](int64_t i) {
    const int64_t end = eqquant::smaller_of(size, (i + 1) * part);
    for (int64_t at = i * part; at < end; at += page) memory[at] = 0;
  });
}
