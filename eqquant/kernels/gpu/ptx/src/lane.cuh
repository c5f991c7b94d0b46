// The primitives of a lane of a warp. `tests/kernels/ptx/lane.cuh` has the same for
// CPUs.
#pragma once

using Word = unsigned int;

template <int size>
struct alignas(4 * size) Words {
  Word words[size];
};
using Vector = Words<4>;

#define EACH _Pragma("unroll")
#define ONE_BY_ONE _Pragma("unroll 1")
#define ON_LANE __device__ __forceinline__

// (a & mask) | others
ON_LANE Word and_or(Word a, Word mask, Word others) {
  Word r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(others));
  return r;
}

// (a & mask) ^ others
ON_LANE Word and_xor(Word a, Word mask, Word others) {
  Word r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(mask), "r"(others));
  return r;
}

// a + b, for pairs of bfloat16. (It multiplies by one, since sm_80 has only `fma`.)
ON_LANE Word add_pair(Word a, Word b) {
  Word r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return r;
}

// a * b, for pairs of bfloat16. (Adding -0 changes nothing.)
ON_LANE Word multiply_pair(Word a, Word b) {
  Word r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}

// The elementwise maximum of two pairs of positive bfloat16.
ON_LANE Word largest_of_pairs(Word a, Word b) {
  Word r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// A pair of equal numbers, rounded to nearest.
ON_LANE Word round_to_pair(float x) {
  Word r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(r) : "f"(x));
  return r;
}

// Four of the eight bytes of two words. Each digit of `which`, base 16, chooses one, the
// lowest digit the lowest byte.
ON_LANE Word permuted(Word a, Word b, Word which) { return __byte_perm(a, b, which); }

ON_LANE Word larger(Word a, Word b) {
  Word r;
  asm("max.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

ON_LANE float of_bits(Word bits) { return __uint_as_float(bits); }
ON_LANE Word bits_of(float number) { return __float_as_uint(number); }

// a * b + c, rounded once
ON_LANE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

ON_LANE float of_half(unsigned short bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

// d[16, 8] = a[16, 16] @ b[16, 8] + c[16, 8], by a whole warp. `a` and `b` are
// bfloat16.
ON_LANE void multiply_add(float* d, const Word* a, const Word* b, const float* c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
      "{%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
        "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Loads codes. A product reads each code once, so codes bypass the cache, which is left
// to the inputs. `nbytes` is 4, 8 or 16, and the address is a multiple of `nbytes`.
template <int nbytes>
ON_LANE void load_once(Word* to, const unsigned char* from) {
  static_assert(nbytes == 4 || nbytes == 8 || nbytes == 16);
  if constexpr (nbytes == 4)
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];"
                 : "=r"(to[0])
                 : "l"(from));
  if constexpr (nbytes == 8)
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "l"(from));
  if constexpr (nbytes == 16)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
}

// Loads data that other lanes and blocks read, too.
ON_LANE Vector load(const Vector* from) {
  const uint4 found = __ldg(reinterpret_cast<const uint4*>(from));
  return {found.x, found.y, found.z, found.w};
}
ON_LANE Words<2> load(const Words<2>* from) {
  const uint2 found = __ldg(reinterpret_cast<const uint2*>(from));
  return {found.x, found.y};
}
template <class T>
ON_LANE T load(const T* from) {
  return __ldg(from);
}

ON_LANE void store(float* to, float value) { *to = value; }

ON_LANE int lane_of_block() { return threadIdx.x; }
ON_LANE int lanes_of_block() { return blockDim.x; }
ON_LANE int block_of_grid(int axis) {
  return axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z;
}
ON_LANE void meet() { __syncthreads(); }

// The bits that are set in any of the four lanes of a row.
ON_LANE Word of_any_of_four(Word bits) {
  bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
  return bits | __shfl_xor_sync(0xffffffffu, bits, 2);
}

// Memory that the lanes of a block share.
#define SHARED __shared__ __align__(16)
#define CONSTANT __constant__
