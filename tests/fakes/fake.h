// Common parts of the fake libraries.
#ifndef JAXMP_TESTS_FAKES_FAKE_H_
#define JAXMP_TESTS_FAKES_FAKE_H_

#include <cstdlib>
#include <type_traits>

#include "csrc/cuda/abi.h"

// Exports a function under the real library's name, with the type that we declare for it.
#define FAKE(name) extern "C" decltype(jaxmp::abi::name) name __attribute__((visibility("default")))

namespace fakes {

inline int Knob(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

}  // namespace fakes

// ---- libcuda's functions that jaxmp does not call

extern "C" {
// Runs work on the stream, in its order, as cuLaunchHostFunc does.
jaxmp::abi::CUresult cuLaunchHostFunc(jaxmp::abi::CUstream stream, void (*work)(void*), void* data);
void fake_cuda_shut_down();  // contexts are gone from now on
// The calls on a device since the last time that put work on its streams or waited for them, in order, as "Name " each;
// without the library's own work (cuLaunchHostFunc). Valid until the next call.
const char* fake_cuda_log(int device);
int fake_cuda_ordinal();                               // of the thread's current context; -1 without one
bool fake_cuda_has(const void* memory, size_t bytes);  // true if it came from cuMemAlloc
int fake_cuda_allocations();                           // of cuMemAlloc, not given back yet
// Memory of all processes of a job (FAKE_CUDA_JOB), at the same addresses in all of them: the board, zeros at first,
// and shared memory that the process which took it gives back.
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
// The same for all ranks of a communicator, and for communicators that were split off it.
const void* fake_nccl_group(jaxmp::abi::ncclComm_t comm);
// Returns another communicator of all its ranks, as ncclCommSplit does. Waits for no one.
jaxmp::abi::ncclComm_t fake_nccl_split(jaxmp::abi::ncclComm_t comm);
// Takes every rank's value, by rank, once all have come. `channel` separates host and stream, because their arrivals
// are not ordered among each other.
void fake_nccl_gather(jaxmp::abi::ncclComm_t comm, int channel, long long value, long long* values);  // NOLINT
// Sends one more signal to the peer; the other function waits until every rank has sent `count` to this one.
void fake_nccl_signal(jaxmp::abi::ncclComm_t comm, int peer);
void fake_nccl_await_signals(jaxmp::abi::ncclComm_t comm, unsigned long long count);  // NOLINT
void fake_nccl_break(int result);               // every communicator then reports it as its asynchronous error
void fake_nccl_exhaust(int device, int times);  // the next `times` allocations fail there
}

// ---- libcublasmp's

extern "C" {
// The calls on a device since the last time, in order, as "Name " or (on the stream) "~Name "; valid until the next.
const char* fake_cublasmp_log(int device);
// Makes the next such call there return the status.
void fake_cublasmp_fail(const char* call, int device, int status);
int fake_cublasmp_live();  // objects and buffers that were made and not destroyed
}

#endif  // JAXMP_TESTS_FAKES_FAKE_H_
