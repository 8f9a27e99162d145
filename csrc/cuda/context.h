// A CUDA context made current for a scope.
#ifndef JAXMP_CUDA_CONTEXT_H_
#define JAXMP_CUDA_CONTEXT_H_

#include "csrc/cuda/libraries.h"

namespace jaxmp::cuda {

// The libraries take whichever context is current. Where XLA calls a handler that may be its device's, another or none:
// one client of XLA's runs a device's programs on any thread of a pool. The watchdog's thread has none.
class CurrentContext {
 public:
  explicit CurrentContext(abi::CUcontext context) {
    abi::CUcontext current = nullptr;
    const Driver& driver = Loaded()->driver;
    is_current_ = driver.CtxGetCurrent(&current) == abi::CUDA_SUCCESS && current == context;
    if (is_current_) return;
    is_pushed_ = is_current_ = driver.CtxPushCurrent_v2(context) == abi::CUDA_SUCCESS;
  }
  ~CurrentContext() {
    abi::CUcontext popped = nullptr;
    if (is_pushed_) (void)Loaded()->driver.CtxPopCurrent_v2(&popped);
  }
  // Whether it is current now.
  bool ok() const { return is_current_; }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool is_current_ = false, is_pushed_ = false;
};

}  // namespace jaxmp::cuda

#endif  // JAXMP_CUDA_CONTEXT_H_
