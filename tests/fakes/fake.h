// What the fake libraries have in common.
#ifndef JAXMP_TESTS_FAKES_FAKE_H_
#define JAXMP_TESTS_FAKES_FAKE_H_

#include <cstdlib>
#include <type_traits>

#include "csrc/cuda/abi.h"

// Exported under the real library's name, and of the type that we declare for it.
#define FAKE(name) extern "C" decltype(jaxmp::abi::name) name __attribute__((visibility("default")))

namespace fakes {

inline int Knob(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

}  // namespace fakes

// ---- libcuda's, beyond what jaxmp calls

extern "C" {
// Runs work on the stream, in its order, as cuLaunchHostFunc does.
jaxmp::abi::CUresult cuLaunchHostFunc(jaxmp::abi::CUstream stream, void (*work)(void*), void* data);
void fake_cuda_shut_down();  // contexts are gone from here on
// What was put on the streams of a device, or waited for them, since the last time, in order, each "Name "; not the
// library's own work (cuLaunchHostFunc). Valid until the next.
const char* fake_cuda_log(int device);
int fake_cuda_ordinal();                               // of the thread's current context; -1 without one
bool fake_cuda_has(const void* memory, size_t bytes);  // whether cuMemAlloc gave it
int fake_cuda_allocations();                           // of cuMemAlloc, that were not given back
// Of all processes of a job (FAKE_CUDA_JOB), at the same addresses in each: zeros at first; and memory that the process
// which took it gives back.
void* fake_cuda_board();
void* fake_cuda_share(size_t bytes);
void fake_cuda_unshare(void* shared);
}

constexpr size_t kFakeBoardBytes = size_t{256} << 20;

// ---- libnccl's

constexpr int kFakeMostRanks = 16;  // of a communicator
enum : int { kFakeOnHost, kFakeOnStream };

extern "C" {
int fake_nccl_rank(jaxmp::abi::ncclComm_t comm);
int fake_nccl_nranks(jaxmp::abi::ncclComm_t comm);
// The same for all ranks of a communicator, and for those that were split off it.
const void* fake_nccl_group(jaxmp::abi::ncclComm_t comm);
// All ranks of it once more, as ncclCommSplit gives them. Waits for nobody.
jaxmp::abi::ncclComm_t fake_nccl_split(jaxmp::abi::ncclComm_t comm);
// Takes every rank's value, by rank, once all have come. `channel` keeps host and stream apart, whose arrivals are not
// ordered among each other.
void fake_nccl_gather(jaxmp::abi::ncclComm_t comm, int channel, long long value, long long* values);  // NOLINT
// One more signal to the peer; waits until every rank has sent this one so many.
void fake_nccl_signal(jaxmp::abi::ncclComm_t comm, int peer);
void fake_nccl_await_signals(jaxmp::abi::ncclComm_t comm, unsigned long long count);  // NOLINT
void fake_nccl_break(int result);               // every communicator reports it as its asynchronous error
void fake_nccl_exhaust(int device, int times);  // so many of its next allocations fail there
}

// ---- libcublasmp's

extern "C" {
// The calls on a device since the last time, in order, each "Name " or, on the stream, "~Name "; valid until the next.
const char* fake_cublasmp_log(int device);
// Has the next such call there return the status.
void fake_cublasmp_fail(const char* call, int device, int status);
int fake_cublasmp_live();  // objects and buffers that were made and not destroyed
}

#endif  // JAXMP_TESTS_FAKES_FAKE_H_
