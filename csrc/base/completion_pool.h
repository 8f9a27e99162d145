// Threads on which programs resume.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace jaxmp {

// Programs may block on these threads, so one is added whenever none is idle, and kept. Never destroyed.
class CompletionPool {
 public:
  void Post(std::function<void()> work);

 private:
  void Serve();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
  size_t idle_ = 0;
};

}  // namespace jaxmp
