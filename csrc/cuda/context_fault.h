// A kernel that fails its device's context on purpose.
#ifndef JAXMP_CUDA_CONTEXT_FAULT_H_
#define JAXMP_CUDA_CONTEXT_FAULT_H_

#include <memory>

#include "csrc/base/status.h"
#include "csrc/cuda/abi.h"

namespace jaxmp::cuda {

// An aborted communicator lets the kernels that use it return, with whatever they have by then, and the stream would go
// on as if that were a result. With its context failed, whoever waits for the stream gets an error instead.
class ContextFault {
 public:
  // Of the current context. Runs the kernel once, unsprung: loading a kernel may wait for the device, and then the
  // device will not come to an end.
  static StatusOr<std::unique_ptr<const ContextFault>> Make();

  // Whether the context has failed, with everything on its streams, which takes some milliseconds where the device has
  // room for one more thread.
  bool Raise() const;

 private:
  ContextFault() = default;
  Status Launch(bool is_sprung) const;

  abi::CUfunction kernel_ = nullptr;
  abi::CUstream stream_ = nullptr;
  abi::CUevent done_ = nullptr;
};

}  // namespace jaxmp::cuda

#endif  // JAXMP_CUDA_CONTEXT_FAULT_H_
