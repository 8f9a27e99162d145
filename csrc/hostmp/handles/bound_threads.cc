#include "csrc/hostmp/handles/bound_threads.h"

#include <sched.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {
namespace {

class BoundThread {
 public:
  explicit BoundThread(int processor) {
    std::thread([this, processor] { Serve(processor); }).detach();
  }

  void Post(const std::function<void()>& work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(work);
    }
    wake_.notify_one();
  }

 private:
  void Serve(int processor) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(processor), &set);
    sched_setaffinity(0, sizeof(set), &set);  // where the system refuses, the thread helps wherever it is
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !waiting_.empty(); });
      std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      work = nullptr;  // with all that it holds
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
};

// By processor, in the order of processors(). Never destroyed: the threads outlive main.
const std::vector<std::unique_ptr<BoundThread>>& bound_threads() {
  static const auto* const all = [] {
    auto* const made = new std::vector<std::unique_ptr<BoundThread>>;
    for (const int processor : processors()) made->push_back(std::make_unique<BoundThread>(processor));
    return made;
  }();
  return *all;
}

}  // namespace

void BoundThreads::Schedule(int64_t threads, const std::function<void()>& work) {
  const auto& all = bound_threads();
  const int64_t here = current_processor();  // if none of them, the first one is asked first
  for (int64_t i = 1; i <= threads; ++i) all[static_cast<size_t>(here + i) % all.size()]->Post(work);
}

}  // namespace jaxmp::hostmp
