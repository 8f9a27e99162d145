// The environment of a library's calls: memory, a stream, a communicator. One object belongs to one rank and one
// thread.
#ifndef JAXMP_TESTS_CONFORMANCE_BACKEND_H_
#define JAXMP_TESTS_CONFORMANCE_BACKEND_H_

#include <cstddef>
#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"

namespace jaxmp::conformance {

class Rank {
 public:
  virtual ~Rank() = default;
  virtual abi::ncclComm_t comm() const = 0;
  // The stream of the next call, which is the `number`-th call of every rank.
  virtual abi::cudaStream_t stream(int64_t number) = 0;
  // Called if a call was refused and did not reach the stream; its peers may be waiting for it.
  virtual void give_up(const std::string& why) = 0;
  // Waits for the other ranks if they may share a device, as jaxmp does.
  virtual Status meet() { return {}; }
  // Waits until the call is done.
  virtual Status synchronize() = 0;
  // Returns memory that the library can use; null if there is none.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual Status write(void* to, const void* from, size_t bytes) = 0;
  virtual Status read(void* to, const void* from, size_t bytes) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const MpApi& api() const = 0;
  // Collective: called by each rank on its own thread, which then keeps the rank to its end.
  virtual StatusOr<std::unique_ptr<Rank>> make_rank(int rank) = 0;
  // Returns what the library has said about its calls since the last time: the algorithms that it took.
  virtual std::string take_words() { return ""; }
  // The largest size of a workspace; one of this size serves all calls.
  virtual size_t workspace_bytes() const = 0;
};

// hostmp, which multiplies on this many threads in addition to the ranks' threads.
std::unique_ptr<Backend> make_host_backend(int nranks, int threads = 0);

// Paths of the libraries, or names for the loader. With a file, ranks of other processes get NCCL's id through it.
struct CudaOptions {
  std::string cublasmp = "libcublasmp.so.0", nccl = "libnccl.so.2", driver = "libcuda.so.1", id_file;
};
// Ranks share the GPUs in turns; NCCL has to be told so (docs/gpu.md).
StatusOr<std::unique_ptr<Backend>> make_cuda_backend(int nranks, const CudaOptions& options);

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_BACKEND_H_
