// The custom call `jaxmp_matmul` on CUDA devices.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/cuda/communicator.h"
#include "csrc/ffi/handler.h"
#include "csrc/plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct CudaSite : SiteType<CudaSite> {
  explicit CudaSite(Problem problem);

  // Makes the plan, once the libraries are open; further calls do nothing.
  Status Open();

  const Problem problem;
  const std::shared_ptr<const std::string> text;  // of the problem, for messages
  // Set by Open().
  std::shared_ptr<Plan> plan;
  std::shared_ptr<const cuda::CudaCommunicator> communicator;
  // The state of the call on one device.
  struct Place {
    int local_rank = 0;
    abi::CUcontext context = nullptr;  // the device's own; it lives as long as the process
  };
  std::mutex mutex;
  std::map<int, Place> places;  // by device ordinal, from the device's first call on; guarded by mutex

 private:
  std::atomic<bool> is_open_{false};
};

// Runs once per call site: decodes the attributes, refuses what cuBLASMp does not compute, and resolves the plan if the
// libraries are open. Needs no device: programs may be compiled on a machine without one.
XLA_FFI_Error* CudaMatmulInstantiate(XLA_FFI_CallFrame* frame);

// Runs once per device and execution, on the device's own thread; call_frame.h has the arguments and results. It
// returns when everything is on the stream. The first execution on a device makes what that rank needs, which is
// collective and waits for the stream; later ones set the pointers and enqueue the product.
XLA_FFI_Error* CudaMatmulExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp
