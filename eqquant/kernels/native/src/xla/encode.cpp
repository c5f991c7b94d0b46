// The functions that XLA calls to encode numbers.
#include "arrays/encode.h"
#include "arrays/trellis.h"

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

ffi::Error encode_tiles(ffi::ThreadPool pool, ffi::Buffer<ffi::S16> numbers,
                        ffi::Buffer<ffi::S16> points,
                        ffi::Result<ffi::Buffer<ffi::U32>> words, int64_t tile,
                        int32_t states, int32_t bits) {
  TrellisEncoding e = {};
  const auto shape = numbers.dimensions();
  const auto number = static_cast<int64_t>(numbers.element_count());
  e.size = shape.size() == 0 ? 0 : shape[shape.size() - 1];
  e.rows = e.size == 0 ? 0 : number / e.size;
  e.tile = tile, e.states = states, e.bits = bits;
  const bool known = 8 <= states && states <= 16 && 1 <= bits && bits <= 8;
  if (!known || tile <= 0 || tile % 32 != 0 || e.size % 32 != 0 ||
      static_cast<int64_t>(points.element_count()) != int64_t{1} << states ||
      static_cast<int64_t>(words->element_count()) != number / 32 * bits)
    return wrong("there should be as many words as the codes of the numbers take");
  e.numbers = numbers.typed_data();
  e.points = points.typed_data();
  e.words = words->typed_data();
  std::atomic<bool> done{true};
  on(pool)(trellis_tasks(e), [&](int64_t i, int64_t) {
    if (!encode_trellis(e, i)) done = false;
  });
  return done ? ffi::Error::Success() : no_memory();
}

auto bind_encode_tiles() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::S16>>()
      .Arg<ffi::Buffer<ffi::S16>>()
      .Ret<ffi::Buffer<ffi::U32>>()
      .Attr<int64_t>("tile")
      .Attr<int32_t>("states")
      .Attr<int32_t>("bits");
}

ffi::Error encode_with_feedback(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> numbers,
                                ffi::Buffer<ffi::F32> targets,
                                ffi::Buffer<ffi::F32> feedback,
                                ffi::Buffer<ffi::F32> weights,
                                ffi::Buffer<ffi::S16> points,
                                ffi::Result<ffi::Buffer<ffi::U32>> words,
                                int32_t states, int32_t bits) {
  TrellisFeedback e = {};
  const auto number = static_cast<int64_t>(numbers.element_count());
  e.size = static_cast<int64_t>(weights.element_count());
  e.rows = e.size == 0 ? 0 : number / e.size;
  e.states = states, e.bits = bits;
  const bool known = 8 <= states && states <= 16 && 1 <= bits && bits <= 8;
  if (!known || e.size % 32 != 0 || e.size > kMostFeedback ||
      number != e.rows * e.size ||
      static_cast<int64_t>(targets.element_count()) != number ||
      static_cast<int64_t>(feedback.element_count()) != e.size * e.size ||
      static_cast<int64_t>(points.element_count()) != int64_t{1} << states ||
      static_cast<int64_t>(words->element_count()) != number / 32 * bits)
    return wrong("there should be as many words as the codes of the numbers take");
  e.numbers = numbers.typed_data();
  e.targets = targets.typed_data();
  e.feedback = feedback.typed_data();
  e.weights = weights.typed_data();
  e.points = points.typed_data();
  e.words = words->typed_data();
  std::atomic<bool> done{true};
  on(pool)(trellis_feedback_tasks(e), [&](int64_t i, int64_t) {
    if (!encode_trellis_with_feedback(e, i)) done = false;
  });
  return done ? ffi::Error::Success() : no_memory();
}

auto bind_encode_with_feedback() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::S16>>()
      .Ret<ffi::Buffer<ffi::U32>>()
      .Attr<int32_t>("states")
      .Attr<int32_t>("bits");
}

}  // namespace
}  // namespace eqquant

EQQUANT_HANDLER(eqquant_encode_with_feedback, eqquant::encode_with_feedback,
                eqquant::bind_encode_with_feedback());
EQQUANT_HANDLER(eqquant_encode_tiles, eqquant::encode_tiles,
                eqquant::bind_encode_tiles());
EQQUANT_HANDLER(eqquant_encode, eqquant::encode_numbers, eqquant::bind_encode());
