// The state of the fake libcublasmp.so.0: objects, the communicators that they belong to, past calls, and calls that a
// test wants to fail.
#ifndef JAXMP_TESTS_FAKES_CUBLASMP_STATE_H_
#define JAXMP_TESTS_FAKES_CUBLASMP_STATE_H_

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "csrc/cublasmp/api_table.h"
#include "csrc/hostmp/handles/handles.h"
#include "csrc/hostmp/handles/runtime.h"
#include "tests/fakes/fake.h"

// A process may have several builds of the library, with a state for each of them.
#pragma GCC visibility push(hidden)

namespace fakes {

using namespace jaxmp::abi;  // NOLINT: cuBLASMp's own names

inline const jaxmp::MpApi& host() { return jaxmp::host_api(); }

struct Handle {
  int ordinal;
  CUstream stream;
};

// A registered buffer's addresses, by rank.
using Windows = std::array<long long, kFakeMostRanks>;  // NOLINT

struct State {
  std::mutex mutex;
  std::map<const void*, std::unique_ptr<jaxmp::hostmp::Group>> groups;  // by fake_nccl_group()
  std::map<cublasMpHandle_t, Handle> handles;
  std::map<cublasMpGrid_t, ncclComm_t> grids;
  std::map<std::pair<const void*, int>, ncclComm_t> comms;  // of a group's first grid, by hostmp's group and the rank
  std::map<std::pair<void*, cublasMpGrid_t>, Windows> buffers;  // registered
  std::map<ncclComm_t, Windows> first_windows;                  // with FAKE_CUBLASMP_ONE_BUFFER
  std::set<const void*> descriptors;
  std::map<ncclComm_t, int> running;                    // products that have not ended, by the rank's communicator
  std::map<std::pair<std::string, int>, int> failures;  // status of the next such call on a device
  std::map<int, std::string> log;                       // by device
  cublasMpLoggerCallback_t logger = nullptr;
  int log_level = 0;
};

State& state();

void Log(int ordinal, const std::string& entry);
void Say(int level, const char* function, const std::string& message);

// Notes the call; returns the status that a test wants for it.
cublasMpStatus_t Enter(const std::string& name);

// Reports why a call failed, and returns the status.
cublasMpStatus_t Report(cublasMpStatus_t status, const char* function);

// Waits for every rank; returns an error if their values differ.
cublasMpStatus_t Agree(ncclComm_t comm, long long value);  // NOLINT

const jaxmp::hostmp::Group& GroupOf(ncclComm_t comm);  // hostmp's side of a communicator, in this process
ncclComm_t CommOf(cublasMpGrid_t grid);                // null if there is no such grid
// A descriptor holds hostmp's copy of a grid. Returns the communicator of the first grid of its group, the same on all
// ranks.
ncclComm_t CommOf(cublasMpMatrixDescriptor_t desc);
Handle HandleOf(cublasMpHandle_t handle);  // {-1, null}

// True if ranks reach each other's memory. If they do not, cublasMpMalloc says so at once and waits for no one.
bool IsSymmetric();
bool IsRegistered(void* work);  // on any grid
// The windows of the workspace; with FAKE_CUBLASMP_ONE_BUFFER=1 always of the communicator's first workspace.
Windows WindowsOf(void* work, ncclComm_t comm);
bool HasWorkspace(void* work, size_t bytes);  // registered; or any memory if none is symmetric, or no bytes

}  // namespace fakes

#pragma GCC visibility pop

#endif  // JAXMP_TESTS_FAKES_CUBLASMP_STATE_H_
