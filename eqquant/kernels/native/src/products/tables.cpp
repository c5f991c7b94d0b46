// The instruction sets. Their tables of kernels are combined from the tables of units.
// `build.py` defines two lists: `EQQUANT_SETS` has `EQQUANT_SET(features, names)` for
// each set, and `EQQUANT_PARTS` has `EQQUANT_PART(set, unit)` for each unit of a set
// and of the sets that it extends, the latter first.
#include <cstddef>
#include <cstring>

#include "products/kernels.h"

namespace eqquant {

#define EQQUANT_PART(set, unit) extern const Kernels unit;
EQQUANT_PARTS
#undef EQQUANT_PART

namespace {

// Replaces the kernels that a unit has. Its other entries are null.
void add(const Kernels& unit, Kernels& table) {
  constexpr size_t kernels = sizeof(Kernels) / sizeof(void*);
  void *from[kernels], *to[kernels];
  std::memcpy(from, &unit, sizeof(Kernels));
  std::memcpy(to, &table, sizeof(Kernels));
  for (size_t i = 0; i < kernels; ++i)
    if (from[i] != nullptr) to[i] = from[i];
  std::memcpy(&table, to, sizeof(Kernels));
}

// Returns the first set that has a feature: the sets that extend it come later.
int32_t set_of(Feature own, const Sets& sets) {
  int32_t i = 0;
  while ((sets.first[i].features & own) == 0) ++i;
  return i;
}

}  // namespace

Sets sets() {
  static const Sets all = [] {
#define EQQUANT_SET(features, names) {#names, features, {}},
    static Set found[] = {EQQUANT_SETS};
#undef EQQUANT_SET
    const Sets these = {found, sizeof(found) / sizeof(Set)};
#define EQQUANT_PART(set, unit) add(unit, found[set_of(k##set, these)].kernels);
    EQQUANT_PARTS
#undef EQQUANT_PART
    return these;
  }();
  return all;
}

const Kernels& table_of(Feature own) {
  const Sets all = sets();
  return all.first[set_of(own, all)].kernels;
}

}  // namespace eqquant
