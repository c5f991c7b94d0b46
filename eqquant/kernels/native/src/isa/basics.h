// Macros and small functions for all kernels.
#pragma once

#include <cstdint>
#include <type_traits>

// Unrolls a loop with a constant trip count, so that small arrays stay in registers.
#define EQQUANT_UNROLL _Pragma("GCC unroll 32")
// After a loop that accumulates into `x`: otherwise GCC also stores it in each
// iteration.
#ifdef __aarch64__
#define EQQUANT_ADDED_UP(x) asm("" : "+w"(x))
#else
#define EQQUANT_ADDED_UP(x) asm("" : "+v"(x))
#endif
// Keeps inner loops out of their callers, whose variables would take registers.
#define EQQUANT_INNERMOST __attribute__((noinline))
// Arrays of vectors stay in registers only if the functions that use them are inlined.
#define EQQUANT_INLINE __attribute__((always_inline))
// Also inlines everything that the function calls.
#define EQQUANT_FLAT __attribute__((flatten))
// Marks functions that are called from outside of the library.
#ifdef _WIN32
#define EQQUANT_EXPORT extern "C" __declspec(dllexport)
#else
#define EQQUANT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace eqquant {

// Headers define functions in unnamed namespaces. With external linkage, the linker
// could merge a function with its copy for a newer instruction set.
namespace {

template <int n>
using Number = std::integral_constant<int, n>;

constexpr int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
constexpr int64_t larger(int64_t x, int64_t y) { return x < y ? y : x; }
constexpr int64_t divided_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Prefetches memory that is read soon into the first or the second cache.
template <int cache>
EQQUANT_INLINE inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 4 - cache);
}

// Lets the other thread of a core run during a short wait.
inline void wait_briefly() {
#ifdef __aarch64__
  asm volatile("isb");
#else
  __builtin_ia32_pause();
#endif
}

}  // namespace
}  // namespace eqquant
