// The function that XLA calls to encode numbers.
#include "arrays/encode.h"

#include <atomic>
#include <cstdint>

#include "isa/basics.h"
#include "xla/call.h"
#include "xla/ffi/api/ffi.h"

namespace eqquant {
namespace {

ffi::Error encode_numbers(ffi::ThreadPool pool, ffi::AnyBuffer numbers,
                  ffi::Result<ffi::Buffer<ffi::U8>> blocks, bool across, int64_t block,
                  int64_t part, bool repeats, int32_t search,
                  ffi::Span<const float> factors, ffi::Span<const float> points,
                  int32_t codes, int32_t steps, int32_t zero, int64_t bytes,
                  ffi::Span<const int32_t> bits) {
  Encoding e = {};
  switch (numbers.element_type()) {
    case ffi::F32: e.type = NumberType::kFloat32; break;
    case ffi::BF16: e.type = NumberType::kBfloat16; break;
    case ffi::F16: e.type = NumberType::kFloat16; break;
    default: return wrong("numbers should be float32, bfloat16 or float16");
  }
  const auto shape = numbers.dimensions(), found = blocks->dimensions();
  const size_t last = shape.size() - 1;
  if (shape.size() < 2 || found.size() != shape.size())
    return wrong("numbers should be matrices");
  e.rows = shape[across ? last : last - 1];
  e.size = shape[across ? last - 1 : last];
  e.matrices = 1;
  for (size_t i = 0; i + 2 < shape.size(); ++i) e.matrices *= shape[i];
  if (found[last] != e.rows ||
      found[last - 1] != divided_up(e.size, block) * bytes ||
      static_cast<int64_t>(blocks->element_count()) !=
          e.matrices * found[last - 1] * e.rows)
    return wrong("there should be as many blocks as those of the numbers");
  e.numbers = numbers.untyped_data();
  e.across = across;
  e.blocks = blocks->typed_data();
  e.block = block, e.part = part, e.repeats = repeats;
  e.search = static_cast<Search>(search);
  e.factors = factors.begin(), e.candidates = static_cast<int64_t>(factors.size());
  e.points = points.begin();
  e.codes = codes, e.steps = steps, e.zero = zero, e.bytes = bytes;
  e.bits = reinterpret_cast<const StoredBits*>(bits.begin());
  e.number = static_cast<int64_t>(bits.size() / 5);
  std::atomic<bool> done{true};
  on(pool)(encoding_tasks(e), [&](int64_t i, int64_t) {
    if (!encode(e, i)) done = false;
  });
  return done ? ffi::Error::Success() : no_memory();
}

auto bind_encode() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::Buffer<ffi::U8>>()
      .Attr<bool>("across")
      .Attr<int64_t>("block")
      .Attr<int64_t>("part")
      .Attr<bool>("repeats")
      .Attr<int32_t>("search")
      .Attr<ffi::Span<const float>>("factors")
      .Attr<ffi::Span<const float>>("points")
      .Attr<int32_t>("codes")
      .Attr<int32_t>("steps")
      .Attr<int32_t>("zero")
      .Attr<int64_t>("bytes")
      .Attr<ffi::Span<const int32_t>>("bits");
}

}  // namespace
}  // namespace eqquant

EQQUANT_HANDLER(eqquant_encode, eqquant::encode_numbers, eqquant::bind_encode());
