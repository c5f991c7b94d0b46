// Shared by the searches for paths through a trellis.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

namespace eqquant {
namespace {

// An uninitialised array, aligned to 64 bytes.
template <class T>
class Array {
 public:
  explicit Array(int64_t number)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(number) * sizeof(T),
                                             std::align_val_t(64), std::nothrow))) {}
  ~Array() { ::operator delete(data_, std::align_val_t(64)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  bool failed() const { return data_ == nullptr; }
  T& operator[](int64_t i) const { return data_[i]; }
  T* get() const { return data_; }

 private:
  T* const data_;
};

// Packs the codes of a path, given in reverse order, from the lowest bit of the first
// word on.
inline void write_path(const uint16_t* path, int64_t size, int32_t bits,
                       uint32_t* words) {
  std::memset(words, 0, static_cast<size_t>(size * bits / 8));
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t code = path[size - 1 - i] & ((1 << bits) - 1);
    const int64_t word = i * bits / 32, bit = i * bits % 32;
    words[word] |= static_cast<uint32_t>(code << bit);
    if (bit + bits > 32) words[word + 1] |= static_cast<uint32_t>(code >> (32 - bit));
  }
}

}  // namespace
}  // namespace eqquant
