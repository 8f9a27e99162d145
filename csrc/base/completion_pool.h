// Threads on which programs resume.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

namespace jaxmp {

// Programs may block on these threads, so one is added whenever none is idle, up to `most`, and kept; each begins with
// `begin`. Never destroyed.
class CompletionPool {
 public:
  explicit CompletionPool(
      size_t most = SIZE_MAX, std::function<void()> begin = [] {})
      : most_(most), begin_(std::move(begin)) {}
  void Post(std::function<void()> work);

 private:
  void Serve();

  const size_t most_;
  const std::function<void()> begin_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
  size_t threads_ = 0, idle_ = 0;
};

}  // namespace jaxmp
