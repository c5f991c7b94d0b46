// The functions that XLA calls. They check their operands, choose the kernels of an
// instruction set, and run them on XLA's thread pool.
#include "xla/ffi/api/ffi.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "products/kernels.h"
#include "xla/call.h"
#include "xla/names.h"
#include "xla/operands.h"
#include "xla/whole_products.h"

namespace eqquant {
namespace {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Bits = ffi::Buffer<ffi::U32>;
using Result = ffi::Result<ffi::Buffer<ffi::F32>>;

// Whether a set has the kernels for a product.
bool has(const Kernels& kernels, Product product) {
  switch (product) {
#define EQQUANT_PRODUCT(name) \
  case Product::name: return kernels.name != nullptr;
    EQQUANT_PRODUCTS(EQQUANT_PRODUCT)
#undef EQQUANT_PRODUCT
  }
  return false;
}

// Whether the points of codes are consecutive integers, or for codes of one bit,
// integers that are two apart.
bool are_consecutive(const Blocks& w) {
  if (w.packing == Packing::kBits8) return true;
  int codes = w.packing == Packing::kTrits ? 3 : 1 << bits_of(w.packing);
  // (Points of digits that are not codes are zeros.)
  while (codes > 2 && w.points[codes - 1] == 0) --codes;
  const float step = w.packing == Packing::kBits1 ? 2 : 1;
  for (int i = 0; i < codes; ++i)
    if (w.points[i] != w.points[0] + step * static_cast<float>(i)) return false;
  return w.points[0] == static_cast<float>(static_cast<int32_t>(w.points[0]));
}

// Returns why kernels that read whole bytes of codes do not take a weight, or "".
std::string not_in_bytes(const Blocks& w) {
  const int64_t per = codes_per_byte(w.packing);
  if (per == 0 || w.in_panels() || (w.block < w.k && w.block % per != 0))
    return "this product is for bytes of whole codes of a block, side by side";
  if (w.offset == Offset::kMinimum) return "this product is for weights without minima";
  if (w.offset == Offset::kZeroPoint && w.packing != Packing::kBits4)
    return "zero-points are for nibbles";
  if (w.packing == Packing::kBits8 && w.point_type != PointType::kSigned)
    return "this product is for codes of 8 bits that are signed integers";
  return "";
}

// Returns why a product cannot be computed for a weight, or "".
std::string refused(Product product, const Kernels& kernels, const Blocks& w,
                    int64_t rows) {
  const PointType points = w.point_type;
  switch (product) {
    case Product::float32:
    case Product::float32_across: return "";
    case Product::bfloat16:
      return w.packing == Packing::kTrits
                 ? "products of bfloat16 are for codes of whole bits"
                 : "";
    case Product::int16:
      return points == PointType::kE4M3 || points == PointType::kE5M2
                 ? "products of integers are for points that are integers"
                 : "";
    case Product::int8_few_rows:
      return rows > kFewPartRows || !kernels.has_fours(w)
                 ? "products of three digits are for at most " +
                       std::to_string(kFewPartRows) +
                       " rows, and for integers of 8 bits, four of which are of one "
                       "block"
                 : "";
    case Product::lookup_tables:
    case Product::transposed: return not_in_bytes(w);
    case Product::bfloat16_nibbles:
      return w.packing != Packing::kBits4 || w.offset != Offset::kNone
                 ? "products of bfloat16 are for nibbles without zero-points"
                 : not_in_bytes(w);
    case Product::int8:
      if (auto p = not_in_bytes(w); !p.empty()) return p;
      // (Otherwise the last four of a block would reach into the next one.)
      if (w.block < w.k && w.in_bytes.block % bytes_of_fours(w.packing) != 0)
        return "blocks should be of whole fours";
      return are_consecutive(w) ? ""
                                : "products of integers are for consecutive points";
  }
  return "there is no such product";
}

// Returns the problem with the operands of a product from `from` to `to` columns, or
// "".
std::string check(const Weights& w, const Matrices& x, const Matrices& y, int64_t from,
                  int64_t to) {
  std::string problem = w.problem();
  if (!problem.empty()) return problem;
  if (x.number != w.number() || y.number != w.number() || x.rows != y.rows)
    return "inputs and results should have as many rows, and as many weights";
  if (x.columns != from || y.columns != to)
    return "inputs should have " + std::to_string(from) + " columns and results " +
           std::to_string(to) + ", got " + std::to_string(x.columns) + " and " +
           std::to_string(y.columns);
  return "";
}

// `y[m, n] = x[m, k] @ w[n, k].T`, or `y[m, k] = x[m, n] @ w[n, k]`, for each weight of
// a stack. Inputs are floats, or for `int8` also integers `x[m, k]` in units of their
// row. The points of the table are scaled by `unit`.
ffi::Error multiply(const ffi::ThreadPool& pool, const ffi::AnyBuffer& x,
                    const Floats& unit_of_row, const Operands& o, Result& y,
                    Product product, int32_t set, float unit) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || !has(*kernels, product)) return no_kernel(set);
  const bool rounded = x.element_type() == ffi::S8;
  if (!rounded && x.element_type() != ffi::F32)
    return wrong("inputs should be of float32 or int8");
  if (rounded && product != Product::int8) return wrong("inputs should be of float32");
  const Weights weights(o);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  const Matrices units(unit_of_row.dimensions());
  const bool across =
      product == Product::float32_across || product == Product::transposed;
  const int64_t from = across ? weights.n() : weights.k();
  const int64_t to = across ? weights.k() : weights.n();
  if (auto p = check(weights, xs, ys, from, to); !p.empty()) return wrong(p);
  if (rounded &&
      (units.number != xs.number || units.rows != xs.rows || units.columns != 1))
    return wrong("there should be a unit for each row");
  for (int64_t i = 0; i < weights.number(); ++i) {
    const Blocks w = weights[i];
    if (auto p = refused(product, *kernels, w, xs.rows); !p.empty()) return wrong(p);
    const Products<Scratch> whole(*kernels, w, xs.rows, on(pool));
    const auto* const mine = static_cast<const uint8_t*>(x.untyped_data()) +
                             i * xs.each() * (rounded ? 1 : 4);
    float* const found = y->typed_data() + i * ys.each();
    const auto* const floats = reinterpret_cast<const float*>(mine);
    const auto done = [&] {
      switch (product) {
        case Product::float32: return whole.float32(floats, found);
        case Product::float32_across: return whole.float32_across(floats, found);
        case Product::bfloat16: return whole.bfloat16(floats, found);
        case Product::int16: return whole.int16(floats, found, unit);
        case Product::int8_few_rows: return whole.int8_few_rows(floats, found, unit);
        case Product::lookup_tables: return whole.lookup_tables(floats, found);
        case Product::transposed: return whole.transposed(floats, found);
        case Product::bfloat16_nibbles: return whole.bfloat16_nibbles(floats, found);
        case Product::int8:
          return rounded ? whole.int8(reinterpret_cast<const int8_t*>(mine),
                                      unit_of_row.typed_data() + i * xs.rows, found)
                         : whole.int8(floats, found);
      }
      return false;
    };
    if (!done()) return no_memory();
  }
  return ffi::Error::Success();
}

// The signature that XLA binds: all operands and attributes of a weight, one by one.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats unit_of_row,
                   ffi::AnyBuffer codes, ffi::AnyBuffer scale, Bits factor,
                   ffi::AnyBuffer offset, Floats points, Result y, int32_t product,
                   int32_t packing, int64_t block, int32_t scale_type,
                   int32_t offset_type, int32_t point_type, int32_t base, int64_t k,
                   bool in_panels, int32_t set, float unit) {
  return multiply(pool, x, unit_of_row,
                  {codes, scale, factor, offset, points, packing, scale_type,
                   offset_type, point_type, base, block, k, in_panels},
                  y, static_cast<Product>(product), set, unit);
}

auto bind_product() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Floats>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Bits>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Floats>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Attr<int32_t>("product")
      .Attr<int32_t>("packing")
      .Attr<int64_t>("block")
      .Attr<int32_t>("scale_type")
      .Attr<int32_t>("offset_type")
      .Attr<int32_t>("point_type")
      .Attr<int32_t>("base")
      .Attr<int64_t>("k")
      .Attr<bool>("in_panels")
      .Attr<int32_t>("set")
      .Attr<float>("unit");
}

// Whether a set has the kernels for a product of weights in trellis codes.
bool has(const Kernels& kernels, TrellisProduct product) {
  switch (product) {
#define EQQUANT_PRODUCT(name) \
  case TrellisProduct::name: return kernels.name != nullptr;
    EQQUANT_TRELLIS_PRODUCTS(EQQUANT_PRODUCT)
#undef EQQUANT_PRODUCT
  }
  return false;
}

// The products of `multiply`, for each weight of a stack in trellis codes.
ffi::Error trellis_product(ffi::ThreadPool pool, Floats x, Bits words,
                           ffi::AnyBuffer scale, Result y, int32_t which, int32_t bits,
                           int32_t states, int32_t scale_type, int64_t k, int32_t set) {
  const Kernels* kernels = kernels_of(set);
  const auto product = static_cast<TrellisProduct>(which);
  if (kernels == nullptr || !has(*kernels, product)) return no_kernel(set);
  const Matrices xs(x.dimensions()), ys(y->dimensions());
  const Matrices all(words.dimensions()), scales(scale.dimensions());
  if (bits < 1 || bits > 8 || states < 8 || states > 16 || k < 1 || all.columns < 1 ||
      all.rows != divided_up(k, kWholeNumbers) * bits)
    return wrong("there should be as many words as the codes of the numbers take");
  const auto type = static_cast<ScaleType>(scale_type);
  const bool wide = type == ScaleType::kFloat32;
  if ((!wide && type != ScaleType::kBfloat16 && type != ScaleType::kFloat16) ||
      scale.element_type() != (wide ? ffi::U32 : ffi::U16) ||
      scales.number != all.number || scales.rows != 1 || scales.columns != all.columns)
    return wrong("there should be a scale of 32 or 16 bits for each row");
  const bool across = product == TrellisProduct::trellis_across;
  if (xs.number != all.number || ys.number != all.number || xs.rows != ys.rows ||
      xs.columns != (across ? all.columns : k) ||
      ys.columns != (across ? k : all.columns))
    return wrong("matrices should have shapes that a product has");
  for (int64_t i = 0; i < all.number; ++i) {
    const auto* const mine = static_cast<const uint8_t*>(scale.untyped_data()) +
                             i * scales.each() * bytes_of(type);
    const TrellisWeight w = {
        words.typed_data() + i * all.each(),
        {type, mine, RowOrder::side_by_side(all.columns), false, {}},
        all.columns, k, bits, states};
    const TrellisProducts<Scratch> whole(*kernels, w, xs.rows, on(pool));
    const float* const from = x.typed_data() + i * xs.each();
    float* const found = y->typed_data() + i * ys.each();
    const auto done = [&] {
      switch (product) {
        case TrellisProduct::trellis: return whole.trellis(from, found);
        case TrellisProduct::trellis_across: return whole.trellis_across(from, found);
        case TrellisProduct::trellis_int16: return whole.trellis_int16(from, found);
      }
      return false;
    };
    if (!done()) return no_memory();
  }
  return ffi::Error::Success();
}

auto bind_trellis_product() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()
      .Arg<Bits>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Attr<int32_t>("product")
      .Attr<int32_t>("bits")
      .Attr<int32_t>("states")
      .Attr<int32_t>("scale_type")
      .Attr<int64_t>("k")
      .Attr<int32_t>("set");
}

// `y[m, n] = x[m, k] @ w[n, k].T`, or `x[m, k] @ w[k, n]`, for integers.
ffi::Error int8_matrices(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> x,
                         ffi::Buffer<ffi::S8> w, Result y, bool across, int32_t set) {
  const Kernels* kernels = kernels_of(set);
  if (kernels == nullptr || kernels->int8_matrices == nullptr) return no_kernel(set);
  const Matrices xs(x.dimensions()), ws(w.dimensions()), ys(y->dimensions());
  const int64_t k = across ? ws.rows : ws.columns, n = across ? ws.columns : ws.rows;
  if (xs.number != ws.number || ys.number != ws.number || xs.rows != ys.rows ||
      xs.columns != k || ys.columns != n)
    return wrong("matrices should have shapes that a product has");
  if (xs.each() == 0 || ws.each() == 0 || k >= 1 << 17)
    return wrong("matrices should not be empty, nor too long for sums of 32 bits");
  for (int64_t i = 0; i < ws.number; ++i)
    kernels->int8_matrices(
        {x.typed_data() + i * xs.each(), w.typed_data() + i * ws.each(),
         y->typed_data() + i * ys.each(), xs.rows, n, k, across},
        on(pool));
  return ffi::Error::Success();
}

auto bind_int8_matrices() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::S8>>()
      .Arg<ffi::Buffer<ffi::S8>>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Attr<bool>("across")
      .Attr<int32_t>("set");
}

}  // namespace
}  // namespace eqquant

// The version of XLA's FFI that the library was compiled for, and its instruction sets.
// Python reads them before it registers the functions below.
EQQUANT_EXPORT int32_t eqquant_interface_major() { return XLA_FFI_API_MAJOR; }
EQQUANT_EXPORT int32_t eqquant_interface_minor() { return XLA_FFI_API_MINOR; }

// Returns the names of the features of set `i`, or null if there is no such set.
EQQUANT_EXPORT const char* eqquant_set(int32_t i) {
  const eqquant::Sets all = eqquant::sets();
  return i < all.number ? all.first[i].names : nullptr;
}
// Whether this machine has the set.
EQQUANT_EXPORT int32_t eqquant_is_here(int32_t i) {
  return eqquant::set_here(i) != nullptr;
}
// Whether the set has the kernels with this name.
EQQUANT_EXPORT int32_t eqquant_has(int32_t i, const char* name) {
  const eqquant::Kernels* const kernels = eqquant::kernels_of(i);
  if (kernels == nullptr) return false;
#define EQQUANT_PRODUCT(product) \
  if (std::strcmp(name, #product) == 0) return kernels->product != nullptr;
  EQQUANT_PRODUCTS(EQQUANT_PRODUCT)
  EQQUANT_TRELLIS_PRODUCTS(EQQUANT_PRODUCT)
  EQQUANT_PRODUCT(int8_matrices)
#undef EQQUANT_PRODUCT
  return false;
}

EQQUANT_EXPORT int32_t eqquant_number(const char* name) {
  return eqquant::number_of(name);
}

// See `Kernels::has_fours`.
EQQUANT_EXPORT bool eqquant_has_fours(int32_t set, int32_t packing, int32_t point_type,
                                      int32_t offset, int64_t block, int64_t k,
                                      const float* points) {
  const eqquant::Kernels* kernels = eqquant::kernels_of(set);
  if (kernels == nullptr || kernels->has_fours == nullptr) return false;
  eqquant::Blocks w = {};
  w.packing = static_cast<eqquant::Packing>(packing);
  w.point_type = static_cast<eqquant::PointType>(point_type);
  w.offset = static_cast<eqquant::Offset>(offset);
  w.block = block;
  w.k = k;
  w.points = points;
  return kernels->has_fours(w);
}

EQQUANT_HANDLER(eqquant_product, eqquant::product, eqquant::bind_product());
EQQUANT_HANDLER(eqquant_trellis_product, eqquant::trellis_product,
                eqquant::bind_trellis_product());
EQQUANT_HANDLER(eqquant_int8_matrices, eqquant::int8_matrices,
                eqquant::bind_int8_matrices());
