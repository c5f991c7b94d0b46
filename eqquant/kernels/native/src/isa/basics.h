// What all kernels are written with.
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
// Arrays of vectors stay in registers only if what takes them is part of its caller.
#define EQQUANT_INLINE __attribute__((always_inline))
// The same for everything that a function calls.
#define EQQUANT_FLAT __attribute__((flatten))
// What is called from outside of the library.
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

// Brings memory that is read soon into a cache: the first, or the second.
template <int cache>
EQQUANT_INLINE inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 4 - cache);
}

// Lets the other thread of a core run, where this one waits for a moment.
inline void wait_briefly() {
#ifdef __aarch64__
  asm volatile("isb");
#else
  __builtin_ia32_pause();
#endif
}

}  // namespace
}  // namespace eqquant
