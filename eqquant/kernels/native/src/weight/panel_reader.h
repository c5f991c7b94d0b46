// Reads a panel of a weight: some numbers of a few adjacent rows. A lane is a row.
#pragma once

#include <cstdint>

#include "weight/packing.h"
#include "weight/points.h"
#include "weight/weight.h"

namespace eqquant {
namespace {

// The largest number of codes of a row that are unpacked at a time, and the least
// number of codes that share a scale.
constexpr int64_t kPieceCodes = 160;
constexpr int64_t kRun = 16;
constexpr int64_t kRuns = kPieceCodes / kRun;

}  // namespace

// Codes from `first` to `last` of a piece, all in one block.
struct Run {
  int64_t first, last;
};

// A piece of a panel: some codes of each of its rows; codes of position `k` are at
// `at + k * stride`. For each run of them, and each row:
//
// - `zero`: the integer that was subtracted from codes, so that they are signed. 0 if
//     codes are unchanged, and stand for points. (For each 16 codes, not for each run.)
// - `less`: a further number to subtract, from wide integers.
// - `minimum`, and `rest`: the number that a code equal to `less` stands for.
template <int64_t rows>
struct PieceOfRows {
  int64_t number;  // the number of codes of a row
  int64_t runs;
  Run run[kRuns];
  const uint8_t* at;
  int64_t stride;
  int64_t ahead;  // as in `Unit`
  alignas(64) uint8_t codes[kPieceCodes * rows];
  alignas(64) uint8_t zero[kRuns * rows];
  alignas(64) float scale[kRuns * rows];
  alignas(64) float less[kRuns * rows];
  alignas(64) float minimum[kRuns * rows];
  alignas(64) float rest[kRuns * rows];
};

// How to read the pieces of a packing.
template <int64_t rows>
struct Reader {
  // The number of codes of a piece; the number of pieces that share bytes, and the
  // number of these bytes; and the number of bits of a code, if codes are digits of
  // whole bytes, or 0.
  int64_t codes, slices, bytes;
  int digit;
  // The same as in `Numbers`, for a piece whose `number` and `ahead` are set.
  void (*unpack)(const Blocks&, int64_t i, int64_t n, int64_t count,
                 PieceOfRows<rows>& piece);
  const uint8_t* (*read_runs)(const Blocks&, int64_t i, int64_t n, int64_t count,
                              PieceOfRows<rows>& piece, Places& places);
};

// Returns the reader with vectors of `rows` bytes: see `products/pieces.h`.
template <int64_t rows>
const Reader<rows>& reader_of(Packing packing);

namespace {

template <class V>
struct Piece : PieceOfRows<V::Bytes::lanes> {
  Piece() { this->ahead = kAhead; }
};

template <class V>
class Numbers {
 public:
  using B = typename V::Bytes;
  static constexpr int64_t kRows = B::lanes, W = V::width;
  static_assert(kRows == 4 * W);

  explicit Numbers(const Blocks& w) : w_(w), reader_(reader_of<kRows>(w.packing)) {}

  // Calls `f` with the packing as a compile-time constant.
  template <class F>
  static void with_packing(Packing packing, F f) {
    switch (packing) {
#define EQQUANT_PACKING(name) \
  case Packing::k##name: return f(std::integral_constant<Packing, Packing::k##name>());
      EQQUANT_PACKING(Trits)
      EQQUANT_PACKING(Bits1)
      EQQUANT_PACKING(Bits2)
      EQQUANT_PACKING(Bits3)
      EQQUANT_PACKING(Bits4)
      EQQUANT_PACKING(Bits5)
      EQQUANT_PACKING(Bits6)
      EQQUANT_PACKING(Bits7)
      EQQUANT_PACKING(Bits8)
      EQQUANT_GGUF_TYPES(EQQUANT_PACKING)
#undef EQQUANT_PACKING
    }
  }

  // The number of codes of a piece, except the last of a row.
  int64_t codes() const { return reader_.codes; }
  int64_t pieces() const { return divided_up(w_.k, reader_.codes); }
  // The number of pieces that share bytes.
  int64_t slices() const { return reader_.slices; }

  // See `bytes_ahead`: for loops that read `pieces` pieces of each panel at a time.
  int64_t ahead(int64_t p, int64_t panels, int64_t pieces) const {
    const int64_t bytes = larger(1, pieces / reader_.slices) * reader_.bytes;
    return bytes_ahead(p, panels, kRows, bytes, w_);
  }

  // Unpacks piece `i` of `count` rows from row `n`.
  void unpack(int64_t i, int64_t n, int64_t count, Piece<V>& piece) const {
    piece.number = smaller(reader_.codes, w_.k - i * reader_.codes);
    reader_.unpack(w_, i, n, count, piece);
  }

  // The number of bits of a code, if codes are digits of whole bytes; otherwise 0.
  int digit() const { return reader_.digit; }

  // Reads the parameters of runs, but no codes, and returns the first byte of the
  // codes.
  const uint8_t* read_runs(int64_t i, int64_t n, int64_t count, Piece<V>& piece,
                           Places& places) const {
    piece.number = smaller(reader_.codes, w_.k - i * reader_.codes);
    return reader_.read_runs(w_, i, n, count, piece, places);
  }

  // Decodes the codes from `first` to `last` of a piece, both even except at the end of
  // a row. Calls `put(k, a, b)` for each two codes, with the numbers of code `k` and of
  // the next: four vectors each, in float32, bit-identical to `AbstractFormat.decode`.
  // The number after the last code is zero.
  template <class Put>
  void decode(const Piece<V>& piece, int64_t first, int64_t last, Put put) const {
    with_points<V>(w_, [&](auto points) {
      using P = typename decltype(points)::type;
      w_.offset == Offset::kMinimum ? decode_as<P, true>(piece, first, last, put)
                                    : decode_as<P, false>(piece, first, last, put);
    });
  }

  // Writes the same numbers to memory, where codes are `kRows` apart.
  EQQUANT_INNERMOST void decode(const Piece<V>& piece, int64_t first, int64_t last,
                                float* found) const {
    using Floats = typename V::Floats;
    decode(piece, first, last, [&](int64_t k, const Floats* a, const Floats* b) {
      float* const to = found + (k - first) * kRows;
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) V::store(to + v * W, a[v]);
      if (k + 1 == last) return;
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) V::store(to + kRows + v * W, b[v]);
    });
  }

 private:
  template <class P, bool minima, class Put>
  void decode_as(const Piece<V>& piece, int64_t first, int64_t last, Put put) const {
    const P points(w_);
    for (int64_t r = 0; r < piece.runs; ++r) {
      const Run run = {larger(first, piece.run[r].first),
                       smaller(last, piece.run[r].last)};
      if (run.first < run.last) decode_run<P, minima>(points, piece, r, run, put);
    }
  }

  template <class P, bool minima, class Put>
  void decode_run(const P& points, const Piece<V>& piece, int64_t r, Run run,
                  Put put) const {
    typename V::Floats scale[4], less[4], minimum[4];
    EQQUANT_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int64_t at = r * kRows + v * W;
      scale[v] = V::load(piece.scale + at);
      less[v] = is_wide(w_) ? V::load(piece.less + at) : V::zero();
      if constexpr (minima) {
        minimum[v] = V::load(piece.minimum + at);
        // For integers, these are the points, from the original codes.
        const auto zero = V::to_floats(
            V::template bytes<false>(piece.zero + run.first / kRun * kRows + v * W));
        less[v] = V::sub(V::all(static_cast<float>(w_.base)), zero);
      }
    }
    const auto numbers = [&](int64_t k, typename V::Floats* found) {
      points(piece.at + k * piece.stride, less, found);
      EQQUANT_UNROLL
      for (int v = 0; v < 4; ++v) {
        if constexpr (P::kUnit != 1) found[v] = V::mul(found[v], V::all(P::kUnit));
        if constexpr (std::is_same_v<P, IntegerPoints<V>> && minima)
          found[v] = V::sub(found[v], less[v]);
        if constexpr (minima)
          // Rounded once, as in XLA. If the two terms cancel, the rounding of the
          // product alone would be as large as the number.
          found[v] = V::fma(found[v], scale[v], minimum[v]);
        else
          found[v] = V::mul(found[v], scale[v]);
      }
    };
    typename V::Floats a[4], b[4];
    int64_t k = run.first;
    for (; k + 2 <= run.last; k += 2) {
      numbers(k, a);
      numbers(k + 1, b);
      put(k, a, b);
    }
    if (k == run.last) return;
    numbers(k, a);
    for (int v = 0; v < 4; ++v) b[v] = V::zero();
    put(k, a, b);
  }

  const Blocks& w_;
  const Reader<kRows>& reader_;
};

}  // namespace
}  // namespace eqquant
