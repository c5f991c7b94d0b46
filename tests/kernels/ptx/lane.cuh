// What one lane of a warp can do, on a CPU: `lane.cuh` of the sources. Lanes take turns,
// and wait for each other where a warp multiplies or a block meets. What they read lies
// within the operands, at addresses that a GPU can load from, and what they write is
// written once; `emulate` says if not.
#pragma once
#include <fenv.h>
#include <stdlib.h>
#include <ucontext.h>

// (No header of C++'s library: they take longer to compile than a kernel.)
#include <cstdint>
#include <cstdio>
#include <cstring>

using Word = unsigned int;

template <int size>
struct alignas(4 * size) Words {
  Word words[size];
};
using Vector = Words<4>;

#define EACH
#define ONE_BY_ONE
#define ON_LANE inline
#define SHARED static
#define CONSTANT static const
#define __global__
#define __launch_bounds__(...)

namespace emulator {

struct Range {
  const char* first;
  long long size;
};

struct Lane {
  ucontext_t context;
  bool done;
  alignas(16) char stack[1 << 16];
};

inline Range readable[4], writable;
inline int readables, *written;
inline char error[200];
inline Lane lanes[1024];
inline int threads;
inline ucontext_t scheduler;
inline int now, block[3];
// Of all lanes of each warp, and of the block: how many wait, and how often they have met.
inline int waiting[33], met[33];
inline long long meetings;
inline Word operand_a[32][32][4], operand_b[32][32][2];

inline void fail(const char* what) {
  if (error[0] == 0) std::snprintf(error, sizeof error, "%s (lane %d)", what, now);
}

inline void wait(int place, int number) {
  const int before = met[place];
  if (++waiting[place] == number) {
    waiting[place] = 0, ++met[place], ++meetings;
    return;
  }
  while (met[place] == before) swapcontext(&lanes[now].context, &scheduler);
}

inline bool may_read(const void* from, int nbytes) {
  const char* p = static_cast<const char*>(from);
  if (reinterpret_cast<uintptr_t>(p) % nbytes != 0) return fail("unaligned"), false;
  for (const Range* r = readable; r < readable + readables; ++r)
    if (p >= r->first && p + nbytes <= r->first + r->size) return true;
  return fail("reads what is not there"), false;
}

inline float of(Word bits) {
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}

inline Word to_bfloat16(float x) {
  Word bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulator

inline Word and_or(Word a, Word mask, Word others) { return (a & mask) | others; }

inline Word and_xor(Word a, Word mask, Word others) { return (a & mask) ^ others; }

inline Word add_pair(Word a, Word b) {
  using namespace emulator;
  const float low = of(a << 16) + of(b << 16);
  const float high = of(a & 0xffff0000u) + of(b & 0xffff0000u);
  return to_bfloat16(low) | to_bfloat16(high) << 16;
}

inline Word multiply_pair(Word a, Word b) {
  using namespace emulator;
  const float low = of(a << 16) * of(b << 16);
  const float high = of(a & 0xffff0000u) * of(b & 0xffff0000u);
  return to_bfloat16(low) | to_bfloat16(high) << 16;
}

inline float of_bits(Word bits) { return emulator::of(bits); }

inline Word bits_of(float number) {
  Word bits;
  std::memcpy(&bits, &number, 4);
  return bits;
}

inline Word round_to_pair(float x) { return emulator::to_bfloat16(x) * 0x10001u; }

inline Word permuted(Word a, Word b, Word which) {
  Word r = 0;
  for (int i = 0; i < 4; ++i) {
    const int byte = which >> 4 * i & 7;
    r |= ((byte < 4 ? a : b) >> 8 * (byte % 4) & 255) << 8 * i;
  }
  return r;
}

inline Word larger(Word a, Word b) { return a > b ? a : b; }

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline Word largest_of_pairs(Word a, Word b) {
  const Word low = (a & 0xffff) > (b & 0xffff) ? a : b;
  const Word high = a >> 16 > b >> 16 ? a : b;
  return (low & 0xffff) | (high & 0xffff0000u);
}

inline float of_half(unsigned short bits) {
  const int exponent = bits >> 10 & 31, rest = bits & 1023;
  float r = exponent == 31 ? (rest ? __builtin_nanf("") : __builtin_inff())
            : exponent     ? __builtin_ldexpf(1024.f + rest, exponent - 25)
                           : __builtin_ldexpf(float(rest), -24);
  return bits >> 15 ? -r : r;
}

inline int lane_of_block() { return emulator::now; }
inline int lanes_of_block() { return emulator::threads; }
inline int block_of_grid(int axis) { return emulator::block[axis]; }
inline void meet() { emulator::wait(32, emulator::threads); }

inline Word of_any_of_four(Word bits) {
  using namespace emulator;
  const int warp = now / 32, lane = now % 32;
  operand_a[warp][lane][0] = bits;
  wait(warp, 32);
  for (int i = 0; i < 4; ++i) bits |= operand_a[warp][lane / 4 * 4 + i][0];
  wait(warp, 32);
  return bits;
}

// As the manual of PTX lays out the operands of `mma.m16n8k16`.
inline void multiply_add(float* d, const Word* a, const Word* b, const float* c) {
  using namespace emulator;
  const int warp = now / 32, lane = now % 32;
  std::memcpy(operand_a[warp][lane], a, 16);
  std::memcpy(operand_b[warp][lane], b, 8);
  wait(warp, 32);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int shift = k % 2 ? 0 : 16;
      const int from = k % 8 / 2, half = k / 8;
      const Word x = operand_a[warp][row % 8 * 4 + from][row / 8 + 2 * half];
      const Word y = operand_b[warp][column * 4 + from][half];
      sum += double(of(x << shift & 0xffff0000u)) * of(y << shift & 0xffff0000u);
    }
    d[i] = float(sum);
  }
  wait(warp, 32);
}

template <int nbytes>
inline void load_once(Word* to, const unsigned char* from) {
  std::memset(to, 0, nbytes);
  if (emulator::may_read(from, nbytes)) std::memcpy(to, from, nbytes);
}

template <class T>
inline T load(const T* from) {
  return emulator::may_read(from, sizeof(T)) ? *from : T{};
}

inline void store(float* to, float value) {
  using namespace emulator;
  const long long at = reinterpret_cast<char*>(to) - writable.first;
  if (at < 0 || at + 4 > writable.size) return fail("writes what is not there");
  if (++written[at / 4] != 1) fail("writes twice");
  *to = value;
}

namespace emulator {

using Kernel = void (*)(void*, void*, void*, void*, void*);

inline Kernel kernel;
inline void* operands[5];

inline void enter() {
  kernel(operands[0], operands[1], operands[2], operands[3], operands[4]);
  lanes[now].done = true;
}

inline void run_block() {
  std::memset(waiting, 0, sizeof waiting);
  for (Lane* lane = lanes; lane < lanes + threads; ++lane) {
    lane->done = false;
    getcontext(&lane->context);
    lane->context.uc_stack.ss_sp = lane->stack;
    lane->context.uc_stack.ss_size = sizeof lane->stack;
    lane->context.uc_link = &scheduler;
    makecontext(&lane->context, enter, 0);
  }
  for (int left = threads; left > 0;) {
    const long long before = meetings;
    const int had = left;
    for (now = 0; now < threads; ++now) {
      if (lanes[now].done) continue;
      swapcontext(&scheduler, &lanes[now].context);
      left -= lanes[now].done;
    }
    if (meetings == before && left == had) return fail("lanes wait for each other");
  }
}

}  // namespace emulator

// Runs a kernel on `count` operands of so many bytes, of which the last is its result.
// Returns what went wrong, if anything.
#define EMULATE(name)                                                                   \
  extern "C" __attribute__((visibility("default"))) const char* emulate(                \
      const int* grid, int lanes_of_block, int count, void** operands,                  \
      const long long* nbytes, const int* numbers) {                                    \
    using namespace emulator;                                                           \
    /* (XLA lets its threads take the smallest numbers for zeros.) */                   \
    fenv_t before;                                                                      \
    fegetenv(&before);                                                                  \
    fesetenv(FE_DFL_ENV);                                                               \
    std::memcpy(&sizes, numbers, sizeof sizes);                                         \
    kernel = reinterpret_cast<Kernel>(name);                                            \
    error[0] = 0;                                                                       \
    threads = lanes_of_block;                                                           \
    readables = count - 1;                                                              \
    for (int i = 0; i < count; ++i) {                                                   \
      emulator::operands[i] = operands[i];                                              \
      Range& range = i < readables ? readable[i] : writable;                           \
      range = {static_cast<char*>(operands[i]), nbytes[i]};                             \
    }                                                                                   \
    written = static_cast<int*>(calloc(writable.size / 4 + 1, sizeof(int)));            \
    for (block[2] = 0; block[2] < grid[2]; ++block[2])                                  \
      for (block[1] = 0; block[1] < grid[1]; ++block[1])                                \
        for (block[0] = 0; block[0] < grid[0]; ++block[0]) run_block();                 \
    fesetenv(&before);                                                                  \
    for (long long i = 0; i < writable.size / 4; ++i)                                   \
      if (written[i] != 1) fail("does not write everything");                           \
    free(written);                                                                      \
    return error;                                                                       \
  }
