// Threads of the program's own.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "products/kernels.h"

namespace eqquant {
namespace {

// Threads that take tasks.
class Pool {
 public:
  explicit Pool(int64_t threads) {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { loop(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    ready_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  Parallel parallel() const {
    return {run, this, static_cast<int64_t>(threads_.size()) + 1};
  }

 private:
  static void run(const void* pool, int64_t tasks,
                  void (*task)(void* data, int64_t i, int64_t worker), void* data) {
    struct State {
      std::atomic<int64_t> next{0}, done{0}, workers{1};
    };
    auto state = std::make_shared<State>();
    auto work = [=](int64_t worker) {
      for (int64_t i; (i = state->next.fetch_add(1)) < tasks; ++state->done)
        task(data, i, worker);
    };
    auto* self = static_cast<Pool*>(const_cast<void*>(pool));
    const int64_t helpers = std::min<int64_t>(self->threads_.size(), tasks - 1);
    for (int64_t i = 0; i < helpers; ++i)
      self->schedule([=] { work(state->workers.fetch_add(1)); });
    work(0);
    while (state->done < tasks) std::this_thread::yield();
  }

  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ready_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> waiting_;
  std::vector<std::thread> threads_;
  bool ended_ = false;
};

}  // namespace
}  // namespace eqquant
