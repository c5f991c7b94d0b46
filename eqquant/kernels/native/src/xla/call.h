// Shared by the functions that XLA calls: the choice of kernels, threads, memory, and
// errors.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "isa/here.h"
#include "products/kernels.h"
#include "xla/ffi/api/ffi.h"

// A function that XLA calls.
#define EQQUANT_HANDLER(name, ...)                    \
  EQQUANT_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, __VA_ARGS__)

namespace eqquant {
namespace {

namespace ffi = xla::ffi;

// Returns set `i` of the instruction sets, or null if the machine does not have it.
inline const Set* set_here(int32_t i) {
  const Sets all = sets();
  if (i < 0 || i >= all.number) return nullptr;
  return (all.first[i].features & ~features_here()) == 0 ? all.first + i : nullptr;
}

inline const Kernels* kernels_of(int32_t set) {
  const Set* const found = set_here(set);
  return found == nullptr ? nullptr : &found->kernels;
}

// Runs tasks on the threads of the pool and on the calling thread. Each takes the next
// task as soon as it is free.
inline void run_on_pool(const void* pool, int64_t tasks,
                        void (*task)(void* data, int64_t i, int64_t worker), void* data) {
  auto& threads =
      *const_cast<ffi::ThreadPool*>(static_cast<const ffi::ThreadPool*>(pool));
  struct State {
    std::atomic<int64_t> next{0}, done{0}, workers{1};
  };
  // Shared: a thread of the pool may start only after the caller has returned.
  auto state = std::make_shared<State>();
  auto work = [state, tasks, task, data](int64_t worker) {
    for (int64_t i; (i = state->next.fetch_add(1)) < tasks;) {
      task(data, i, worker);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = smaller(threads.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i)
    threads.Schedule([state, work] { work(state->workers.fetch_add(1)); });
  work(0);
  for (int64_t spins = 0; state->done.load(std::memory_order_acquire) < tasks; ++spins)
    spins < 4096 ? wait_briefly() : std::this_thread::yield();
}

inline Parallel on(const ffi::ThreadPool& pool) {
  return {run_on_pool, &pool, larger(1, pool.num_threads())};
}

// Scratch memory for one call, aligned to 64 bytes. (XLA's allocator is for devices
// only.)
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t number)
      : data_(number == 0 ? nullptr
                          : ::operator new(static_cast<size_t>(number) * sizeof(T),
                                           std::align_val_t(64), std::nothrow)),
        failed_(number != 0 && data_ == nullptr) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  bool failed() const { return failed_; }

 private:
  void* data_;
  bool failed_;
};

inline ffi::Error wrong(const std::string& what) {
  return ffi::Error::InvalidArgument("eqquant: " + what);
}

inline ffi::Error no_kernel(int32_t set) {
  return wrong("there is no such kernel for this machine, of instruction set " +
               std::to_string(set));
}

inline ffi::Error no_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "eqquant: no scratch memory");
}

}  // namespace
}  // namespace eqquant
