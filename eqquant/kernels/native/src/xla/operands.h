// The operands of XLA's calls: checks of their types and shapes, and the weights that
// they describe.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "products/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace eqquant {
namespace {

namespace ffi = xla::ffi;

// The shape of an operand as a stack of matrices: its last two axes, and the number of
// matrices.
struct Matrices {
  int64_t number = 1, rows = 1, columns = 1;

  explicit Matrices(ffi::Span<const int64_t> sizes) {
    const int64_t rank = static_cast<int64_t>(sizes.size());
    for (int64_t i = 0; i < rank; ++i)
      (i + 2 < rank ? number : i + 2 == rank ? rows : columns) *= sizes[i];
  }
  int64_t each() const { return rows * columns; }
};

// Returns the order of the numbers of a matrix whose columns are the rows of a weight.
inline RowOrder order_of(const Matrices& shape, bool in_panels) {
  return in_panels ? RowOrder::in_panels(shape.rows)
                   : RowOrder::side_by_side(shape.columns);
}

// The scales of a stack of weights, and for some types of scales, the bits of a factor
// for each weight.
class ScaleOperands {
 public:
  ScaleOperands(const ffi::AnyBuffer& scale, const ffi::Buffer<ffi::U32>& factor,
                int32_t type)
      : shape(scale.dimensions()),
        scale_(scale),
        factor_(factor),
        factors_(factor.dimensions()),
        type_(type) {}

  const Matrices shape;

  ScaleType type() const { return static_cast<ScaleType>(type_); }
  ffi::DataType element_type() const {
    const int64_t bytes = bytes_of(type());
    return bytes == 4 ? ffi::U32 : bytes == 2 ? ffi::U16 : ffi::U8;
  }

  // Returns the problem with the type or the factors, or "".
  std::string problem() const {
    if (type_ < 0 || type_ > static_cast<int32_t>(ScaleType::kE4M3Inverse))
      return "unknown type of scales " + std::to_string(type_);
    const int64_t wanted = has_factor(type()) ? 1 : 0;
    if (factors_.each() != wanted || factors_.number != shape.number)
      return "there should be " + std::to_string(wanted) +
             " factors of the scales of each weight, got " +
             std::to_string(factors_.each());
    return "";
  }

  // Returns the scales of the weight `i`, whose rows may be in panels.
  BlockFloats of(int64_t i, bool in_panels = false) const {
    float whole = 0;
    if (has_factor(type()))
      std::memcpy(&whole, factor_.typed_data() + i, sizeof(whole));
    return {
        type(),
        static_cast<const uint8_t*>(scale_.untyped_data()) +
            i * shape.each() * bytes_of(type()),
        order_of(shape, in_panels),
        shape.columns == 1,
        factor_of(type(), whole),
    };
  }

 private:
  const ffi::AnyBuffer& scale_;
  const ffi::Buffer<ffi::U32>& factor_;
  Matrices factors_;
  int32_t type_;
};

// The operands and attributes of a weight, as passed by XLA. Types with a codebook pass
// it in place of scales.
struct Operands {
  ffi::AnyBuffer codes, scale;
  ffi::Buffer<ffi::U32> factor;
  ffi::AnyBuffer offset;
  ffi::Buffer<ffi::F32> points;
  int32_t packing, scale_type, offset_type, point_type, base;
  int64_t block, k;
  bool in_panels;
};

// The number of codes that are packed together, and the number of their bytes.
struct Together {
  int64_t codes, bytes;

  static Together of(Packing packing) {
    if (block_codes(packing) > 0) return {block_codes(packing), block_bytes(packing)};
    if (codes_per_byte(packing) > 0) return {codes_per_byte(packing), 1};
    const int64_t bits = bits_of(packing), codes = bits % 2 == 0 ? 4 : 8;
    return {codes, codes * bits / 8};
  }
};

// The stack of weights of a call.
class Weights {
 public:
  explicit Weights(const Operands& o)
      : o_(o),
        codes_(o.codes.dimensions()),
        scale_(o.scale, o.factor, o.scale_type),
        offset_(o.offset.dimensions()),
        points_(o.points.dimensions()) {}

  int64_t number() const { return codes_.number; }
  int64_t n() const { return codes_.columns; }
  int64_t k() const { return o_.k; }

  // Returns the problem with the operands, or "". Nothing is read before this check.
  std::string problem() const {
    if (o_.packing < 0 || o_.packing >= kPackings)
      return "unknown packing " + std::to_string(o_.packing);
    const Together unit = Together::of(packing());
    const auto wanted = o_.point_type == 4 ? ffi::S8 : ffi::U8;
    if (o_.codes.element_type() != wanted || o_.codes.dimensions().size() < 2)
      return "codes should be a matrix of bytes";
    if (codes_.columns < 1 || o_.k < 1 || o_.block < 1)
      return "codes and blocks should not be empty";
    if (codes_.rows / unit.bytes * unit.codes < o_.k)
      return "bytes should have room for " + std::to_string(o_.k) + " codes, got " +
             std::to_string(codes_.rows);
    if (o_.point_type < 0 || o_.point_type > 4 || o_.offset_type < 0 ||
        o_.offset_type > 2)
      return "unknown types of points or offsets";
    if (auto p = scale_.problem(); !p.empty()) return p;
    if (o_.point_type > 1 && o_.packing != 8)
      return "codes of this type should have 8 bits";
    if (o_.offset_type == 1 && (o_.point_type > 0 || o_.base != 0))
      return "zero-points are for integers from 0 on";
    if (o_.base < 0 || o_.base > 255)
      return "the base should have 8 bits, got " + std::to_string(o_.base);
    if (o_.in_panels && codes_.columns % kPanelRows != 0)
      return "panels should be whole, got " + std::to_string(codes_.columns) + " rows";
    if (points_.each() != 256) return "there should be 256 points";
    for (int64_t number : {scale_.shape.number, offset_.number, points_.number})
      if (number != codes_.number)
        return "there should be as many weights in each operand, got " +
               std::to_string(number) + " and " + std::to_string(codes_.number);
    const int64_t points = codebook_points(packing());
    if (points > 0 &&
        (o_.scale.element_type() != ffi::U16 || scale_.shape.each() != points))
      return "there should be a codebook of " + std::to_string(points) + " points";
    if (is_gguf(packing())) return "";
    if (o_.block < o_.k && o_.block % 16 != 0)
      return "blocks should have a multiple of 16 codes";
    const ffi::DataType floats = scale_.element_type();
    const std::string scales = of_blocks("scales", o_.scale, scale_.shape, floats);
    if (!scales.empty() || o_.offset_type == 0) return scales;
    if (o_.offset_type == 2) {
      if (floats == ffi::U8) return "minima should have 32 bits, or 16";
      return of_blocks("minima", o_.offset, offset_, floats);
    }
    if (offset_.columns != n()) return "there should be zero-points for each row";
    return of_blocks("zero-points", o_.offset, offset_, ffi::U8);
  }

  Blocks operator[](int64_t i) const {
    const bool minima = o_.offset_type == 2;
    return {
        packing(),
        static_cast<const uint8_t*>(o_.codes.untyped_data()) + i * codes_.each(),
        order_of(codes_, o_.in_panels),
        n(),
        o_.k,
        smaller(o_.block, o_.k),
        InBytes::of(packing(), o_.block, o_.k),
        scale_.of(i, o_.in_panels),
        static_cast<Offset>(o_.offset_type),
        o_.offset_type == 1
            ? static_cast<const uint8_t*>(o_.offset.untyped_data()) + i * offset_.each()
            : nullptr,
        order_of(offset_, o_.in_panels),
        {scale_.type(),
         static_cast<const uint8_t*>(o_.offset.untyped_data()) +
             (minima ? i : 0) * offset_.each() * bytes_of(scale_.type()),
         order_of(offset_, o_.in_panels),
         offset_.columns == 1,
         {}},
        static_cast<PointType>(o_.point_type),
        o_.base,
        o_.points.typed_data() + i * points_.each(),
        codebook_points(packing()) == 0
            ? nullptr
            : static_cast<const uint16_t*>(o_.scale.untyped_data()) +
                  i * scale_.shape.each(),
    };
  }

 private:
  Packing packing() const { return static_cast<Packing>(o_.packing); }

  std::string of_blocks(const std::string& what, const ffi::AnyBuffer& buffer,
                        const Matrices& shape, ffi::DataType type) const {
    if (buffer.element_type() != type) return what + " are of another type";
    // Bytes and blocks may have room for more codes than a row has.
    const Together unit = Together::of(packing());
    const int64_t room = codes_.rows / unit.bytes * unit.codes;
    const int64_t blocks = divided_up(o_.k, o_.block);
    const bool fits = blocks <= shape.rows && shape.rows <= divided_up(room, o_.block);
    if (!fits || (shape.columns != n() && shape.columns != 1))
      return "there should be " + what + " for " + std::to_string(blocks) +
             " blocks of each row or of all, got " + std::to_string(shape.rows) +
             " x " + std::to_string(shape.columns);
    return "";
  }

  const Operands& o_;
  Matrices codes_;
  ScaleOperands scale_;
  Matrices offset_, points_;
};

}  // namespace
}  // namespace eqquant
