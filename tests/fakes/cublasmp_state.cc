#include "tests/fakes/cublasmp_state.h"

#include <algorithm>
#include <array>

namespace fakes {
State& state() {
  static auto* const only = new State;  // streams may still run at exit
  return *only;
}

void Log(int ordinal, const std::string& entry) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log[ordinal] += entry + " ";
}

void Say(int level, const char* function, const std::string& message) {
  cublasMpLoggerCallback_t logger = nullptr;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (level <= state().log_level) logger = state().logger;
  }
  if (logger) logger(level, function, message.c_str());
}

cublasMpStatus_t Enter(const std::string& name) {
  const int ordinal = fake_cuda_ordinal();
  if (ordinal < 0) return CUBLASMP_STATUS_EXECUTION_FAILED;
  Log(ordinal, name);
  int failure = 0;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().failures.find({name, ordinal});
    if (found == state().failures.end()) return CUBLASMP_STATUS_SUCCESS;
    failure = found->second;
    state().failures.erase(found);
  }
  Say(1, ("cublasMp" + name).c_str(), "a cause");
  Say(1, ("cublasMp" + name).c_str(), "as the test wants it");
  return static_cast<cublasMpStatus_t>(failure);
}

cublasMpStatus_t Report(cublasMpStatus_t status, const char* function) {
  if (status != CUBLASMP_STATUS_SUCCESS) Say(1, function, host().last_error());
  return status;
}

cublasMpStatus_t Agree(ncclComm_t comm, long long value) {  // NOLINT
  const int nranks = fake_nccl_nranks(comm);
  std::array<long long, kFakeMostRanks> values{};  // NOLINT
  fake_nccl_gather(comm, kFakeOnHost, value, values.data());
  const bool is_equal =
      std::all_of(values.begin(), values.begin() + nranks, [value](auto other) { return other == value; });
  return is_equal ? CUBLASMP_STATUS_SUCCESS : CUBLASMP_STATUS_INVALID_VALUE;
}

const jaxmp::hostmp::Group& GroupOf(ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::unique_ptr<jaxmp::hostmp::Group>& group = state().groups[fake_nccl_group(comm)];
  if (!group) group = std::make_unique<jaxmp::hostmp::Group>(fake_nccl_nranks(comm));
  return *group;
}

ncclComm_t CommOf(cublasMpGrid_t grid) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().grids.find(grid);
  return found == state().grids.end() ? nullptr : found->second;
}

ncclComm_t CommOf(cublasMpMatrixDescriptor_t desc) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().comms.find({desc->grid.comm.group, desc->grid.comm.rank});
  return found == state().comms.end() ? nullptr : found->second;
}

Handle HandleOf(cublasMpHandle_t handle) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().handles.find(handle);
  return found == state().handles.end() ? Handle{-1, nullptr} : found->second;
}

bool IsRegistered(void* work) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().buffers.lower_bound({work, nullptr});
  return found != state().buffers.end() && found->first.first == work;
}

Windows WindowsOf(void* work, ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const Windows windows = state().buffers.lower_bound({work, nullptr})->second;
  return Knob("FAKE_CUBLASMP_ONE_BUFFER", 0) ? state().first_windows.try_emplace(comm, windows).first->second : windows;
}

bool IsSymmetric() { return Knob("FAKE_CUBLASMP_SYMMETRIC", 1) != 0; }

bool HasWorkspace(void* work, size_t bytes) {
  return bytes == 0 || IsRegistered(work) || (!IsSymmetric() && fake_cuda_has(work, bytes));
}

}  // namespace fakes

using fakes::state;

const char* fake_cublasmp_log(int device) {
  static thread_local std::string taken;
  std::lock_guard<std::mutex> lock(state().mutex);
  taken = std::exchange(state().log[device], "");
  return taken.c_str();
}
void fake_cublasmp_fail(const char* call, int device, int status) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().failures[{call, device}] = status;
}
int fake_cublasmp_live() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().handles.size() + state().grids.size() + state().buffers.size() +
                          state().descriptors.size());
}
