// The kernels of a product for an instruction set. `build.py` compiles this for each
// pair, with the headers of both included first.
#include "products/kernels.h"

namespace eqquant {
namespace {

constexpr Kernels added() {
  Kernels found = {};
  EQQUANT_ADD<EQQUANT_SET>(found);
  return found;
}

}  // namespace

extern const Kernels EQQUANT_UNIT;
constexpr Kernels EQQUANT_UNIT = added();

}  // namespace eqquant
