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

// The shape of an operand as a stack of matrices: its last two axes, and how many there
// are.
struct Matrices {
  int64_t number = 1, rows = 1, columns = 1;

  explicit Matrices(ffi::Span<const int64_t> sizes) {
    const int64_t rank = static_cast<int64_t>(sizes.size());
    for (int64_t i = 0; i < rank; ++i)
      (i + 2 < rank ? number : i + 2 == rank ? rows : columns) *= sizes[i];
  }
  int64_t each() const { return rows * columns; }
};

// The order of the numbers of a matrix, whose columns are the rows of a weight.
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

  // What is wrong with the type or the factors, or "".
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

  // Those of the weight `i`, whose rows may be in panels.
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

// The operands and attributes of a weight, as XLA passes them.
struct Operands {
  ffi::AnyBuffer codes, scale;
  ffi::Buffer<ffi::U32> factor;
  ffi::Buffer<ffi::U8> zero;
  ffi::Buffer<ffi::F32> points;
  int32_t kind, scale_type, offset, used;
  int64_t block, k;
};

// The stack of weights of a call.
class Weights {
 public:
  explicit Weights(const Operands& o)
      : o_(o),
        codes_(o.codes.dimensions()),
        scale_(o.scale, o.factor, o.scale_type),
        zero_(o.zero.dimensions()),
        points_(o.points.dimensions()) {}

  int64_t number() const { return codes_.number; }
  int64_t n() const { return codes_.columns; }
  int64_t k() const { return codes_.rows * codes_per_byte(kind()); }
  int64_t k_in_fours() const { return codes_of(kind(), codes_.rows); }

  // What is wrong with the operands, or "". Nothing is read before this is checked.
  std::string problem() const {
    if (o_.kind < 0 || o_.kind > static_cast<int32_t>(Codes::kBits))
      return "unknown kind of codes " + std::to_string(o_.kind);
    const auto wanted = o_.kind == 0 ? ffi::S8 : ffi::U8;
    if (o_.codes.element_type() != wanted || o_.codes.dimensions().size() < 2)
      return "codes should be a matrix of bytes, signed if each is one code";
    if (codes_.rows < 1 || codes_.columns < 1 || o_.block < 1)
      return "codes and blocks should not be empty";
    const int64_t blocks = divided_up(codes_.rows, block());
    if (auto p = scale_.problem(); !p.empty()) return p;
    if (o_.scale.element_type() != scale_.element_type())
      return "scales should be the bits of floats of their type";
    const Matrices& scales = scale_.shape;
    if (scales.rows != blocks || (scales.columns != n() && scales.columns != 1))
      return "there should be scales for " + std::to_string(blocks) +
             " blocks of each row or of all, got " + std::to_string(scales.rows) +
             " x " + std::to_string(scales.columns);
    if (zero_.each() != 0 && (zero_.rows != blocks || zero_.columns != n()))
      return "there should be zero-points for " + std::to_string(blocks) +
             " blocks of each row, got " + std::to_string(zero_.rows) + " x " +
             std::to_string(zero_.columns);
    if (zero_.each() != 0 && kind() != Codes::kNibbles)
      return "zero-points are for nibbles";
    if (o_.offset < -255 || o_.offset > 255)
      return "the offset should have 8 bits, got " + std::to_string(o_.offset);
    if (points_.each() != 16) return "there should be 16 points";
    if (o_.used < 1 || o_.used > codes_per_byte(kind()) || o_.k < 1 ||
        o_.k > codes_.rows * o_.used)
      return "bytes should have room for codes, got " + std::to_string(o_.used) +
             " in each and " + std::to_string(o_.k) + " in all";
    for (int64_t number : {scales.number, zero_.number, points_.number})
      if (number != codes_.number)
        return "there should be as many weights in each operand, got " +
               std::to_string(number) + " and " + std::to_string(codes_.number);
    return "";
  }

  Weight operator[](int64_t i) const {
    const BlockFloats scales = scale_.of(i);
    return {
        kind(),
        static_cast<const uint8_t*>(o_.codes.untyped_data()) + i * codes_.each(),
        codes_.rows,
        n(),
        block(),
        scale_.shape.rows,
        scales.scale_type,
        scales.scale,
        scales.order,
        scales.shared,
        scales.factor,
        zero_.each() == 0 ? nullptr : o_.zero.typed_data() + i * zero_.each(),
        o_.points.typed_data() + i * points_.each(),
        o_.offset,
        o_.used,
        o_.k,
    };
  }

 private:
  Codes kind() const { return static_cast<Codes>(o_.kind); }
  // At most a whole row.
  int64_t block() const { return smaller(o_.block, codes_.rows); }

  const Operands& o_;
  Matrices codes_;
  ScaleOperands scale_;
  Matrices zero_, points_;
};

}  // namespace
}  // namespace eqquant
