// A libnccl.so.2 with ranks on threads of one process, or of the processes of a job. Calls that block on the host or on
// a stream block here as well, until every rank has come.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/fakes/fake.h"
#include "tests/fakes/nccl_group.h"

namespace fakes {

void Await(const std::function<bool()>& holds) {
  constexpr int kYields = 200;  // then it sleeps, because a rank may stay away for long
  for (int i = 0; !holds(); ++i) {
    i < kYields ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Channel::Gather(int rank, int nranks, long long value, long long* taken) {  // NOLINT
  const auto at = [](auto& by_rank, int r) -> auto& { return by_rank[static_cast<size_t>(r)]; };
  const uint64_t turn = at(begun, rank)++;
  auto& of_turn = values[turn % kTurns];
  at(of_turn, rank) = value;
  Await([&] { return at(arrived, rank) == turn; });  // a thread of this rank that came before
  at(arrived, rank) = turn + 1;
  Await(
      [&] { return std::all_of(arrived.begin(), arrived.begin() + nranks, [&](const auto& n) { return n > turn; }); });
  std::copy(of_turn.begin(), of_turn.begin() + nranks, taken);
}

}  // namespace fakes

namespace {

using fakes::Group;

// Every communicator of the job, by NCCL's id or by its parent. No locks, because a process may die at any time.
struct Entry {
  enum State : int { kFree, kWriting, kWritten };
  std::atomic<int> state;
  std::array<char, sizeof(jaxmp::abi::ncclUniqueId::internal)> key;
  Group group;
};
struct Board {
  static constexpr size_t kMostEntries = 4096;
  std::atomic<int> ids;
  std::array<Entry, kMostEntries> entries;
};
static_assert(sizeof(Board) <= kFakeBoardBytes);

Board& board() { return *static_cast<Board*>(fake_cuda_board()); }

Group* GroupOf(const std::string& name) {
  std::array<char, sizeof(Entry::key)> key{};
  std::copy(name.begin(), name.end(), key.begin());
  for (Entry& entry : board().entries) {
    int state = Entry::kFree;
    if (entry.state.compare_exchange_strong(state, Entry::kWriting)) {
      entry.key = key;
      entry.state = Entry::kWritten;
    }
    fakes::Await([&] { return entry.state == Entry::kWritten; });
    if (entry.key == key) return &entry.group;
  }
  std::fprintf(stderr, "fake nccl: too many communicators\n");
  std::abort();
}

std::mutex mutex;
std::map<int, int>& refusals() {
  static auto* const all = new std::map<int, int>;  // by device: the allocations that are still to fail
  return *all;
}
std::atomic<int> asynchronous_error{0};

}  // namespace

namespace jaxmp::abi {

struct ncclComm {
  Group* group;
  std::string name;  // of the group
  Group* root;       // the one that this was split off, or itself
  int rank, nranks;
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
  *id = {};
  const std::string text = "id " + std::to_string(board().ids++);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  const int ordinal = fake_cuda_ordinal();
  if (ordinal < 0 || rank < 0 || rank >= nranks || nranks > kFakeMostRanks) return ncclInvalidUsage;
  const std::string name(id.internal, strnlen(id.internal, sizeof(id.internal)));
  Group* const group = GroupOf(name);
  auto made = std::make_unique<ncclComm>(ncclComm{group, name, group, rank, nranks});
  std::vector<long long> devices(kFakeMostRanks);  // NOLINT
  fake_nccl_gather(made.get(), kFakeOnHost, ordinal, devices.data());
  const auto on_this = std::count(devices.begin(), devices.begin() + nranks, ordinal);
  if (on_this > 1 && !fakes::Knob("NCCL_MULTI_RANK_GPU_ENABLE", 0)) return ncclInvalidUsage;
  *comm = made.release();
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
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
int fake_nccl_nranks(ncclComm_t comm) { return comm->nranks; }
const void* fake_nccl_group(ncclComm_t comm) { return comm->root; }
ncclComm_t fake_nccl_split(ncclComm_t comm) {
  std::string name;
  {
    std::lock_guard<std::mutex> lock(mutex);
    name = comm->name + "/" + std::to_string(comm->splits++);
  }
  return new ncclComm{GroupOf(name), name, comm->root, comm->rank, comm->nranks};
}
void fake_nccl_gather(ncclComm_t comm, int channel, long long value, long long* values) {  // NOLINT
  comm->group->channels[static_cast<size_t>(channel)].Gather(comm->rank, comm->nranks, value, values);
}
void fake_nccl_signal(ncclComm_t comm, int peer) {
  ++comm->group->signals[static_cast<size_t>(comm->rank)][static_cast<size_t>(peer)];
}
void fake_nccl_await_signals(ncclComm_t comm, unsigned long long count) {  // NOLINT
  const auto& signals = comm->group->signals;
  for (size_t peer = 0; peer < static_cast<size_t>(comm->nranks); ++peer) {
    fakes::Await([&] { return signals[peer][static_cast<size_t>(comm->rank)] >= count; });
  }
}
fakes::Mail* fake_nccl_mail(ncclComm_t comm, int from, int to) {
  return &comm->group->mail[static_cast<size_t>(from)][static_cast<size_t>(to)];
}
void fake_nccl_break(int result) { asynchronous_error = result; }
void fake_nccl_exhaust(int device, int times) {
  std::lock_guard<std::mutex> lock(mutex);
  refusals()[device] = times;
}
