// The threads that help with a product, one for each processor.
#pragma once

#include <cstdint>
#include <functional>

#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {

// Helper threads, one bound to each of processors(); made when the first product asks for help, and shared by all
// BoundThreads. The thread of the next processor after the caller's is asked first, the caller's own last. Linux may
// wake an unbound thread on a busy processor and move it to an idle one only at the next tick, milliseconds later;
// until then the product would have one processor less.
class BoundThreads final : public Pool {
 public:
  explicit BoundThreads(int most) : most_(most) {}
  int num_threads() const override { return most_; }
  void Schedule(int64_t threads, const std::function<void()>& work) override;

 private:
  const int most_;
};

}  // namespace jaxmp::hostmp
