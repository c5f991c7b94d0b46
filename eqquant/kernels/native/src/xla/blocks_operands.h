// The operands of XLA's calls for weights of `Blocks`.
#pragma once

#include <cstdint>
#include <string>

#include "products/kernels.h"
#include "xla/operands.h"
#include "xla/ffi/api/ffi.h"

namespace eqquant {
namespace {

// The operands and attributes of a weight, as XLA passes them. In place of scales,
// types with a codebook have that.
struct BlocksOperands {
  ffi::AnyBuffer codes, scale;
  ffi::Buffer<ffi::U32> factor;
  ffi::AnyBuffer offset;
  ffi::Buffer<ffi::F32> points;
  int32_t packing, scale_type, offset_type, point_type, base;
  int64_t block, k;
  bool in_panels;
};

// How many codes are packed together, and in how many bytes.
struct Together {
  int64_t codes, bytes;

  static Together of(int32_t packing) {
    const auto type = static_cast<Packing>(packing);
    if (block_codes(type) > 0) return {block_codes(type), block_bytes(type)};
    if (packing == 0) return {5, 1};
    if (packing < 0 || packing > 8) return {0, 0};
    const int64_t codes = packing == 8       ? 1
                          : packing == 4     ? 2
                          : packing % 2 == 0 ? 4
                                             : 8;
    return {codes, codes * packing / 8};
  }
};

// The stack of weights of a call.
class BlocksWeights {
 public:
  explicit BlocksWeights(const BlocksOperands& o)
      : o_(o),
        codes_(o.codes.dimensions()),
        scale_(o.scale, o.factor, o.scale_type),
        offset_(o.offset.dimensions()),
        points_(o.points.dimensions()) {}

  int64_t number() const { return codes_.number; }
  int64_t n() const { return codes_.columns; }
  int64_t k() const { return o_.k; }

  // What is wrong with the operands, or "". Nothing is read before this is checked.
  std::string problem() const {
    const Together unit = Together::of(o_.packing);
    if (unit.codes == 0) return "unknown packing " + std::to_string(o_.packing);
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
    const int64_t points = codebook_points(static_cast<Packing>(o_.packing));
    if (points > 0 &&
        (o_.scale.element_type() != ffi::U16 || scale_.shape.each() != points))
      return "there should be a codebook of " + std::to_string(points) + " points";
    if (is_gguf()) return "";
    if (o_.block < o_.k && o_.block % 16 != 0)
      return "blocks should have a multiple of 16 codes";
    const int64_t blocks = divided_up(o_.k, o_.block);
    const ffi::DataType floats = scale_.element_type();
    const std::string scales =
        of_blocks("scales", o_.scale, scale_.shape, blocks, floats);
    if (!scales.empty() || o_.offset_type == 0) return scales;
    if (o_.offset_type == 2) {
      if (floats == ffi::U8) return "minima should have 32 bits, or 16";
      return of_blocks("minima", o_.offset, offset_, blocks, floats);
    }
    if (offset_.columns != n()) return "there should be zero-points for each row";
    return of_blocks("zero-points", o_.offset, offset_, blocks, ffi::U8);
  }

  Blocks operator[](int64_t i) const {
    const bool minima = o_.offset_type == 2;
    return {
        static_cast<Packing>(o_.packing),
        static_cast<const uint8_t*>(o_.codes.untyped_data()) + i * codes_.each(),
        order_of(codes_, o_.in_panels),
        n(),
        o_.k,
        smaller(o_.block, o_.k),
        scale_.of(i, o_.in_panels),
        static_cast<Offset>(o_.offset_type),
        minima || is_gguf() ? nullptr
                            : static_cast<const uint8_t*>(o_.offset.untyped_data()) +
                                  i * offset_.each(),
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
        codebook_points(static_cast<Packing>(o_.packing)) == 0
            ? nullptr
            : static_cast<const uint16_t*>(o_.scale.untyped_data()) +
                  i * scale_.shape.each(),
    };
  }

 private:
  bool is_gguf() const { return o_.packing > 8; }

  std::string of_blocks(const std::string& what, const ffi::AnyBuffer& buffer,
                        const Matrices& shape, int64_t blocks,
                        ffi::DataType type) const {
    if (buffer.element_type() != type) return what + " are of another type";
    if (shape.rows != blocks || (shape.columns != n() && shape.columns != 1))
      return "there should be " + what + " for " + std::to_string(blocks) +
             " blocks of each row or of all, got " + std::to_string(shape.rows) +
             " x " + std::to_string(shape.columns);
    return "";
  }

  const BlocksOperands& o_;
  Matrices codes_;
  ScaleOperands scale_;
  Matrices offset_, points_;
};

}  // namespace
}  // namespace eqquant
