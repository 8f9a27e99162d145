#ifndef JAXMP_TESTS_THREADS_H_
#define JAXMP_TESTS_THREADS_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::test {

// A fixed number of threads.
class Threads final : public hostmp::Pool {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { serve(); });
  }
  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return static_cast<int>(threads_.size()); }
  void Schedule(int64_t threads, const std::function<void()>& work) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < threads; ++i) work_.push(work);
    }
    wake_.notify_all();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stops_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = std::move(work_.front());
      work_.pop();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> work_;
  std::vector<std::thread> threads_;
  bool stops_ = false;
};

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_THREADS_H_
