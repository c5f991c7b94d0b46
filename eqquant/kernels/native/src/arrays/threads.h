// Threads for functions that are called without XLA, and so without its pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace eqquant {
namespace {

// Runs `task(i)` for each `i` below `tasks`, on up to `threads` threads, including the
// calling one. If the system provides fewer, it runs on fewer.
template <class Task>
void on_threads(int64_t threads, int64_t tasks, Task task) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(i);
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads && i < tasks; ++i) others.emplace_back(work);
  } catch (const std::exception&) {
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace
}  // namespace eqquant
