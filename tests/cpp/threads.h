#ifndef JAXMP_TESTS_THREADS_H_
#define JAXMP_TESTS_THREADS_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <queue>
#include <string>
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

// The streams of some ranks' calls, and the outcome of each call once all are done.
class Streams {
 public:
  explicit Streams(size_t count) : errors(count), streams_(count), ranks_(count) {}

  hostmp::Stream* start(size_t rank, hostmp::Rendezvous* rendezvous, hostmp::Pool* pool = nullptr, int64_t run_id = 1) {
    ranks_[rank] = {this, rank};
    streams_[rank] = {rendezvous, run_id, 7, pool, done, &ranks_[rank]};
    return &streams_[rank];
  }
  size_t count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return count_ == errors.size(); });
  }

  std::vector<std::string> errors;  // "" for success

 private:
  struct Rank {
    Streams* self;
    size_t number;
  };
  static void done(void* rank, const Status& status) {
    const auto [self, number] = *static_cast<Rank*>(rank);
    std::lock_guard<std::mutex> lock(self->mutex_);
    self->errors[number] = status.message();
    ++self->count_;
    self->wake_.notify_all();
  }

  std::vector<hostmp::Stream> streams_;
  std::vector<Rank> ranks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  size_t count_ = 0;
};

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_THREADS_H_
