// A libnccl.so.2 whose ranks are threads of one process. What blocks on the host or on a stream blocks here as well,
// until every rank has come or the communicator is aborted.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/fake.h"

namespace {

// The i-th arrival of a rank belongs with the i-th of every other.
struct Exchange {
  std::vector<long long> values;  // NOLINT: by rank
  int count = 0;
};

struct Group {
  explicit Group(int nranks) : nranks(nranks) {}

  const int nranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Exchange> exchanges[2];  // by channel; kept, for values are handed out by address
  std::vector<size_t> arrivals[2];    // by channel and rank
  std::atomic<bool> is_aborted{false};

  const long long* Gather(int channel, int rank, long long value) {  // NOLINT
    std::unique_lock<std::mutex> lock(mutex);
    auto& counts = arrivals[channel];
    counts.resize(static_cast<size_t>(nranks));
    const size_t turn = counts[static_cast<size_t>(rank)]++;
    while (exchanges[channel].size() <= turn) {
      exchanges[channel].push_back({std::vector<long long>(static_cast<size_t>(nranks)), 0});  // NOLINT
    }
    Exchange& exchange = exchanges[channel][turn];
    exchange.values[static_cast<size_t>(rank)] = value;
    ++exchange.count;
    changed.notify_all();
    changed.wait(lock, [&] { return exchange.count == nranks || is_aborted; });
    return exchange.count == nranks ? exchange.values.data() : nullptr;
  }

  void Abort() {
    std::lock_guard<std::mutex> lock(mutex);
    is_aborted = true;
    changed.notify_all();
  }
};

std::mutex mutex;
std::map<std::string, std::shared_ptr<Group>>& groups() {
  static auto* const all = new std::map<std::string, std::shared_ptr<Group>>;
  return *all;
}
std::map<int, int>& refusals() {
  static auto* const all = new std::map<int, int>;  // by device: how many allocations are still to fail
  return *all;
}
std::atomic<int> asynchronous_error{0}, live{0};

constexpr int kOnHost = 0;

}  // namespace

namespace jaxmp::abi {

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank;
  std::shared_ptr<Group> root;  // the group that this one was split off; null: none
  size_t splits = 0;
};

}  // namespace jaxmp::abi

using namespace jaxmp::abi;  // NOLINT: NCCL's own names

FAKE(cuMemAlloc_v2);  // libcuda's
FAKE(cuMemFree_v2);
FAKE(ncclGetVersion);
FAKE(ncclGetErrorString);
FAKE(ncclGetLastError);
FAKE(ncclGetUniqueId);
FAKE(ncclCommInitRank);
FAKE(ncclCommDestroy);
FAKE(ncclCommAbort);
FAKE(ncclCommGetAsyncError);
FAKE(ncclMemAlloc);
FAKE(ncclMemFree);

ncclResult_t ncclGetVersion(int* version) {
  *version = fakes::Knob("FAKE_NCCL_VERSION", 23007);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "fake error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> count{0};
  *id = {};
  const std::string text = "id " + std::to_string(count++);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  if (fake_cuda_ordinal() < 0 || rank < 0 || rank >= nranks) return ncclInvalidUsage;
  std::shared_ptr<Group> group;
  {
    std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Group>& known = groups()[std::string(id.internal, sizeof(id.internal))];
    if (!known) known = std::make_shared<Group>(nranks);
    group = known;
  }
  if (group->nranks != nranks) return ncclInvalidArgument;
  const long long* devices = group->Gather(kOnHost, rank, fake_cuda_ordinal());  // NOLINT
  if (!devices) return ncclSystemError;
  if (std::count(devices, devices + nranks, devices[rank]) > 1) return ncclInvalidUsage;  // two ranks on one device
  *comm = new ncclComm{group, rank, nullptr};
  ++live;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  --live;
  return ncclSuccess;
}
// The memory stays: calls that the abort sets free may still look at it.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->group->Abort();
  --live;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = static_cast<ncclResult_t>(asynchronous_error.load());
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  const int device = fake_cuda_ordinal();
  if (device < 0) return ncclInvalidUsage;
  {
    std::lock_guard<std::mutex> lock(mutex);
    int& failures = refusals()[device];
    if (failures > 0) {
      --failures;
      return ncclUnhandledCudaError;
    }
  }
  CUdeviceptr made = 0;
  if (::cuMemAlloc_v2(&made, bytes) != CUDA_SUCCESS) return ncclUnhandledCudaError;
  *pointer = reinterpret_cast<void*>(made);
  return ncclSuccess;
}
ncclResult_t ncclMemFree(void* pointer) {
  const CUresult freed = ::cuMemFree_v2(reinterpret_cast<CUdeviceptr>(pointer));
  return freed == CUDA_SUCCESS ? ncclSuccess : ncclInvalidArgument;
}

int fake_nccl_rank(ncclComm_t comm) { return comm->rank; }
int fake_nccl_nranks(ncclComm_t comm) { return comm->group->nranks; }
const void* fake_nccl_group(ncclComm_t comm) { return comm->root ? comm->root.get() : comm->group.get(); }
ncclComm_t fake_nccl_split(ncclComm_t comm) {
  static auto* const all = new std::map<std::pair<Group*, size_t>, std::shared_ptr<Group>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Group>& known = (*all)[{comm->group.get(), comm->splits++}];
  if (!known) known = std::make_shared<Group>(comm->group->nranks);
  return new ncclComm{known, comm->rank, comm->group};
}
const long long* fake_nccl_gather(ncclComm_t comm, int channel, long long value) {  // NOLINT
  return comm->group->Gather(channel, comm->rank, value);
}
void fake_nccl_break(int result) { asynchronous_error = result; }
void fake_nccl_exhaust(int device, int times) {
  std::lock_guard<std::mutex> lock(mutex);
  refusals()[device] = times;
}
int fake_nccl_live() { return live; }
