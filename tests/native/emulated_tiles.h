// The instructions of AMX, for machines that do not have them: each is a signal there,
// whose handler does what the instruction would.
//
// After Intel's "Architecture Instruction Set Extensions Programming Reference", chapter
// 3.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Shapes {
  uint8_t palette, start, none[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Those of a thread. What is not configured has no rows.
struct Tiles {
  Shapes shapes;
  uint8_t of[8][16][64];
};

inline Tiles& tiles() {
  static thread_local Tiles found = {};
  return found;
}

[[noreturn]] inline void stop(const char* why, const uint8_t* at) {
  std::fprintf(stderr, "emulated tiles: %s, in", why);
  for (int i = 0; i < 9; ++i) std::fprintf(stderr, " %02x", at[i]);
  std::fprintf(stderr, "\n");
  std::abort();
}

template <class T>
T read(const uint8_t* at) {
  T found;
  std::memcpy(&found, at, sizeof(T));
  return found;
}

// An instruction: a prefix of three bytes (VEX, of the map 0f38), the opcode,
// and the operands.
struct Instruction {
  enum Prefix { kNone = 0, k66 = 1, kF3 = 2, kF2 = 3 };

  const uint8_t* begin;
  const uint8_t* end;
  uint8_t opcode;
  Prefix prefix;
  bool memory;
  int reg, rm, vvvv;      // three tiles; in memory, `rm` is none
  uint8_t* at = nullptr;  // in memory, row `i` is at `at + i * stride`
  int64_t stride = 0;

  Instruction(const uint8_t* from, const greg_t* registers)
      : begin(from),
        end(from + 5),
        opcode(from[3]),
        prefix(static_cast<Prefix>(from[2] & 3)),
        memory(from[4] >> 6 != 3),
        reg(from[4] >> 3 & 7),
        rm(from[4] & 7),
        vvvv(~from[2] >> 3 & 7) {
    if (from[0] != 0xc4 || (from[1] & 0x1f) != 2) stop("not of this map", from);
    if (memory) read_address(registers);
  }

 private:
  void read_address(const greg_t* registers) {
    const int mod = begin[4] >> 6;
    int64_t found = 0;
    if (rm == 4) {
      const uint8_t sib = *end++;
      const int base = (sib & 7) | (~begin[1] >> 5 & 1) << 3;
      const int index = (sib >> 3 & 7) | (~begin[1] >> 6 & 1) << 3;
      if (mod == 0 && (sib & 7) == 5)
        found = displacement<int32_t>();
      else
        found = value(registers, base);
      if (index != 4) stride = value(registers, index) << (sib >> 6);
    } else if (mod == 0 && rm == 5) {
      found = displacement<int32_t>();
      found += reinterpret_cast<int64_t>(end);
    } else {
      found = value(registers, rm | (~begin[1] >> 5 & 1) << 3);
    }
    if (mod == 1) found += displacement<int8_t>();
    if (mod == 2) found += displacement<int32_t>();
    at = reinterpret_cast<uint8_t*>(found);
  }

  template <class T>
  int64_t displacement() {
    const T found = read<T>(end);
    end += sizeof(T);
    return found;
  }

  static int64_t value(const greg_t* registers, int number) {
    constexpr int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                             REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                             REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[order[number]];
  }
};

template <class X, class Y>
void multiply_integers(const Tiles& t, int x, int y, uint8_t* sum, int m, int n) {
  auto found = read<uint32_t>(sum);
  for (int k = 0; k < t.shapes.rows[y]; ++k)
    for (int i = 0; i < 4; ++i)
      found += static_cast<uint32_t>(static_cast<X>(t.of[x][m][4 * k + i]) *
                                     static_cast<Y>(t.of[y][k][4 * n + i]));
  std::memcpy(sum, &found, 4);
}

// Products of bfloat16 take and give zeros for subnormal numbers.
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float bfloat16(const uint8_t* at) {
  const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(at)) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return flushed(found);
}

inline void multiply_bfloat16(const Tiles& t, int x, int y, uint8_t* sum, int m,
                              int n) {
  float found[2] = {};
  for (int k = 0; k < t.shapes.rows[y]; ++k)
    for (int i = 0; i < 2; ++i)
      found[i] = flushed(found[i] + bfloat16(&t.of[x][m][4 * k + 2 * i]) *
                                        bfloat16(&t.of[y][k][4 * n + 2 * i]));
  const float all = flushed(flushed(read<float>(sum)) + flushed(found[0] + found[1]));
  std::memcpy(sum, &all, 4);
}

inline void multiply(Tiles& t, const Instruction& i) {
  const auto& rows = t.shapes.rows;
  const auto& bytes = t.shapes.bytes;
  const int sums = i.reg, x = i.rm, y = i.vvvv;
  if (sums == x || x == y || sums == y) stop("the same tile twice", i.begin);
  if (rows[sums] == 0 || rows[sums] != rows[x] || bytes[sums] != bytes[y] ||
      bytes[x] != 4 * rows[y])
    stop("shapes that do not fit", i.begin);
  for (int m = 0; m < rows[sums]; ++m)
    for (int n = 0; n < bytes[sums] / 4; ++n) {
      uint8_t* const sum = &t.of[sums][m][4 * n];
      if (i.opcode == 0x5c && i.prefix == Instruction::kF3)
        multiply_bfloat16(t, x, y, sum, m, n);
      else if (i.opcode == 0x5e && i.prefix == Instruction::kF2)
        multiply_integers<int8_t, int8_t>(t, x, y, sum, m, n);
      else if (i.opcode == 0x5e && i.prefix == Instruction::kF3)
        multiply_integers<int8_t, uint8_t>(t, x, y, sum, m, n);
      else
        stop("a product that is not known", i.begin);
    }
}

inline void move(Tiles& t, const Instruction& i) {
  if (t.shapes.rows[i.reg] == 0) stop("a tile that is not configured", i.begin);
  if (!i.memory || i.prefix == Instruction::kNone) stop("no address", i.begin);
  const bool store = i.prefix == Instruction::kF3;
  for (int r = 0; r < t.shapes.rows[i.reg]; ++r) {
    uint8_t* const there = i.at + r * i.stride;
    uint8_t* const here = t.of[i.reg][r];
    std::memcpy(store ? there : here, store ? here : there, t.shapes.bytes[i.reg]);
  }
}

inline void configure(Tiles& t, const Instruction& i) {
  if (i.memory && i.prefix == Instruction::kNone) {
    t = {};
    std::memcpy(&t.shapes, i.at, sizeof(Shapes));
    if (t.shapes.palette != 1 || t.shapes.start != 0) stop("a palette", i.begin);
    for (int k = 0; k < 8; ++k)
      if (t.shapes.rows[k] > 16 || t.shapes.bytes[k] > 64) stop("a shape", i.begin);
  } else if (!i.memory && i.prefix == Instruction::kNone) {
    t = {};
  } else if (!i.memory && i.prefix == Instruction::kF2) {
    if (t.shapes.rows[i.reg] == 0) stop("a tile that is not configured", i.begin);
    std::memset(t.of[i.reg], 0, sizeof t.of[i.reg]);
  } else {
    stop("unknown", i.begin);
  }
}

inline void handle(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction i(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
  switch (i.opcode) {
    case 0x49: configure(tiles(), i); break;
    case 0x4b: move(tiles(), i); break;
    case 0x5c:
    case 0x5e: multiply(tiles(), i); break;
    default: stop("unknown", i.begin);
  }
  registers[REG_RIP] = reinterpret_cast<greg_t>(i.end);
}

inline void install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (sigaction(SIGILL, &action, nullptr) != 0) std::abort();
}

}  // namespace emulated
