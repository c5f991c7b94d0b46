// Compares the kernels of each instruction set that this machine has with plain sums in
// double precision, on random weights in buffers of exactly their size:
//
//     check SEED CASES
//
// Many of the numbers are not what one would like: infinite, not a number, huge, tiny.
//
// Tiles are emulated where there are none.
//
// Made to be compiled with sanitizers.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "case.h"
#include "check_encode.h"
#include "check_int8_matrices.h"
#include "check_products.h"
#include "check_trellis.h"
#include "check_trellis_products.h"
#include "compare.h"
#include "isa/here.h"
#include "pool.h"
#include "products/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#define EQQUANT_EMULATES_TILES
#include "emulated_tiles.h"
#endif

namespace eqquant {
namespace {

// Whether these are the kernels with tiles.
bool has_tiles([[maybe_unused]] const Kernels& kernels) {
#ifdef EQQUANT_EMULATES_TILES
  return &kernels == &table_of(kAmx);
#else
  return false;
#endif
}

void check_case(const Kernels& kernels, const char* set, const Pool& pool) {
  const Case any(false), in_bytes(true);
  Checks(any, kernels, set, pool, has_tiles(kernels)).any();
  const Checks more(in_bytes, kernels, set, pool, has_tiles(kernels));
  more.any();
  more.in_bytes();
  check_int8_matrices(kernels, set, pool);
  TrellisChecks(kernels, set, pool).check();
}

}  // namespace
}  // namespace eqquant

int main(int, char** argument) {
  using namespace eqquant;
  const uint64_t seed = std::strtoull(argument[1], nullptr, 10);
  const int64_t cases = std::strtoll(argument[2], nullptr, 10);
  uint32_t here = features_here();
#ifdef EQQUANT_EMULATES_TILES
  if ((here & kAmx) == 0) emulated::install();
  if ((here & kAvx512Bf16) != 0) here |= kAmx;
#endif
  // How much lies together depends on the number of threads, too.
  const Pool pools[] = {Pool(3), Pool(0)};
  random_bits.seed(seed);
  if ((here & (kAvx2 | kNeon)) != 0)
    for (int64_t i = 0; i < cases; ++i) {
      check_encode(pools[i % 2]);
      check_trellis(pools[i % 2]);
      check_trellis_with_feedback(pools[i % 2]);
    }
  for (const Set& set : sets()) {
    random_bits.seed(seed);
    const bool runs = (set.features & ~here) == 0;
    if (runs)
      for (int64_t i = 0; i < cases; ++i)
        check_case(set.kernels, set.names, pools[i % 2]);
    std::printf("%s: %s\n", set.names, runs ? "done" : "not on this machine");
  }
  std::printf("%" PRId64 " sums, with errors of up to %.1e\n", compared, largest_error);
  std::printf("%" PRId64 " wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
