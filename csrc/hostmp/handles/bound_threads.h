// The threads that help with a product, one for each processor.
#pragma once

#include <cstdint>
#include <functional>

#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {

// There is one thread for each of processors(), made when the first product asks for help and bound to it; they serve
// every BoundThreads. The first to be asked is that of the processor after the asking thread's, its own the last. Linux
// may wake a thread that is not bound on a processor that is busy, and moves it to an idle one only at the next tick,
// milliseconds later; until then the product would have one processor less.
class BoundThreads final : public Pool {
 public:
  explicit BoundThreads(int most) : most_(most) {}
  int num_threads() const override { return most_; }
  void Schedule(int64_t threads, const std::function<void()>& work) override;

 private:
  const int most_;
};

}  // namespace jaxmp::hostmp
