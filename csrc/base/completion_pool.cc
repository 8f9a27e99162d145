#include "csrc/base/completion_pool.h"

#include <thread>
#include <utility>

#include "csrc/base/schedule_noise.h"

namespace jaxmp {

void CompletionPool::Post(std::function<void()> work) {
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(work));
  if (waiting_.size() <= idle_ || threads_ == most_) {
    lock.unlock();
    wake_.notify_one();
  } else {
    std::thread([this] { Serve(); }).detach();
    ++threads_;
  }
}

void CompletionPool::Serve() {
  begin_();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    wake_.wait(lock, [this] { return !waiting_.empty(); });
    --idle_;
    std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    AddScheduleNoise();
    work();
    work = nullptr;  // with all that it holds
    lock.lock();
  }
}

}  // namespace jaxmp
