// Which threads multiply: at most one on each processor, each with an area of the workspace of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {

// The areas of one call, one for each of processors(). Two threads on one processor would take turns on it while
// another processor idles: Linux may leave two threads on one for as long as a product takes. So the second one gets no
// area.
class Workers {
 public:
  Workers() : is_taken_(static_cast<size_t>(machine_threads())) {}

  // An area for a thread on processors()[processor]; -1 if another thread on that processor has it.
  int Join(int processor) {
    if (processor < 0) return JoinAnywhere();  // which of them, the system does not say
    return Take(processor) ? processor : -1;
  }

  // For a thread that was asked to help because a processor was free: if the system did not put it there, it takes the
  // area of another one. -1 if none is left.
  int JoinAsHelper(int processor) {
    const int area = Join(processor);
    return area >= 0 ? area : JoinAnywhere();
  }

 private:
  int JoinAnywhere() {
    for (int area = 0; area < machine_threads(); ++area) {
      if (Take(area)) return area;
    }
    return -1;
  }
  bool Take(int area) { return !is_taken_[static_cast<size_t>(area)].exchange(true, std::memory_order_relaxed); }

  std::vector<std::atomic<bool>> is_taken_;
};

}  // namespace jaxmp::hostmp
