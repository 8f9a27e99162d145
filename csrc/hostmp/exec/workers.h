// Which threads multiply: at most one per processor, with an area of the workspace for each thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {

// The areas of one call, one for each of processors(). Two threads on one processor would take turns while another
// processor idles, because Linux may leave them there for as long as a product takes. So the second thread gets no
// area.
class Workers {
 public:
  Workers() : is_taken_(static_cast<size_t>(machine_threads())) {}

  // Returns an area for a thread on processors()[processor], or -1 if another thread on that processor has it.
  int Join(int processor) {
    if (processor < 0) return JoinAnywhere();  // on none of processors(), so any area will do
    return Take(processor) ? processor : -1;
  }

  // Returns an area for a thread that was asked to help because a processor was free: the area of another processor if
  // the system did not put the thread there, -1 if none is left.
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
