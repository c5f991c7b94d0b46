// The kernels that every instruction set has: those that multiply in float32, which are
// templates of the vectors that they use.
#pragma once

#include "decoded.h"
#include "decoded_transposed.h"
#include "forward.h"
#include "kernels.h"
#include "mend.h"
#include "transposed.h"

namespace eqquant {
namespace {

template <class V>
constexpr Kernels float_kernels() {
  Kernels found = {};
  found.forward_scratch = forward_scratch;
  found.forward = forward<V>;
  found.transposed = transposed<V>;
  found.mend = mend<V>;
  found.mend_transposed = mend_transposed<V>;
  found.decoded_scratch = decoded_scratch<V>;
  found.decoded = decoded<V>;
  found.decoded_transposed = decoded_transposed<V>;
  return found;
}

}  // namespace
}  // namespace eqquant
