// The collectives of the fake libnccl.so.2, jaxmp's and XLA's. On a stream every rank learns where the others' data
// are, takes its part, and writes it once all have taken theirs. Sums are in the order of the ranks.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/fakes/fake.h"
#include "tests/fakes/nccl_group.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace jaxmp::abi;  // NOLINT: NCCL's own names

FAKE(ncclAllReduce);
FAKE(ncclCommInitRank);

namespace {

// ncclDataType_t, by its number.
constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

template <typename T>
void Fold(std::vector<char>* into, const char* from, int op) {
  for (size_t at = 0; at < into->size(); at += sizeof(T)) {
    T x = T(0), y = T(0);
    std::memcpy(&x, into->data() + at, sizeof(T));
    std::memcpy(&y, from + at, sizeof(T));
    const T folded = op == ncclMax ? std::max(x, y) : T(x + y);
    std::memcpy(into->data() + at, &folded, sizeof(T));
  }
}

void Fold(std::vector<char>* into, const char* from, int type, int op) {
  if (type == ncclInt64 && op == ncclMax) return Fold<int64_t>(into, from, op);
  if (type == ncclFloat32 && op == ncclSum) return Fold<float>(into, from, op);
  std::fprintf(stderr, "fake nccl: a reduction of type %d by %d\n", type, op);
  std::abort();  // no test expects it
}

using Take = std::function<std::vector<char>(const std::vector<const char*>& parts)>;  // by rank

ncclResult_t Put(cudaStream_t stream, std::function<void()> work) {
  const auto run = [](void* data) {
    const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(data));
    (*work)();
  };
  auto* const kept = new std::function<void()>(std::move(work));
  return cuLaunchHostFunc(stream, run, kept) == CUDA_SUCCESS ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t Collective(const void* from, void* to, ncclComm_t comm, cudaStream_t stream, Take take) {
  return Put(stream, [=] {
    std::vector<long long> given(kFakeMostRanks);                                            // NOLINT
    fake_nccl_gather(comm, kFakeOnStream, reinterpret_cast<long long>(from), given.data());  // NOLINT
    std::vector<const char*> parts;
    for (size_t rank = 0; rank < static_cast<size_t>(fake_nccl_nranks(comm)); ++rank) {
      parts.push_back(reinterpret_cast<const char*>(given[rank]));
    }
    const std::vector<char> taken = take(parts);
    fake_nccl_gather(comm, kFakeOnStream, 0, given.data());
    std::copy(taken.begin(), taken.end(), static_cast<char*>(to));
  });
}

// Reduces `bytes` of every part, from `offset` on.
Take Reduction(size_t offset, size_t bytes, int type, int op) {
  return [=](const std::vector<const char*>& parts) {
    std::vector<char> sum(parts[0] + offset, parts[0] + offset + bytes);
    for (size_t rank = 1; rank < parts.size(); ++rank) Fold(&sum, parts[rank] + offset, type, op);
    return sum;
  };
}

// Joins the same bytes of every part, one after the other.
Take Concatenation(size_t offset, size_t bytes) {
  return [=](const std::vector<const char*>& parts) {
    std::vector<char> whole;
    for (const char* part : parts) whole.insert(whole.end(), part + offset, part + offset + bytes);
    return whole;
  };
}

struct Receipt {
  void* to;
  size_t bytes;
  int from;
  ncclComm_t comm;
  cudaStream_t stream;
};

ncclResult_t Await(const Receipt& receipt) {
  return Put(receipt.stream, [receipt] {
    fakes::Mail& mail = *fake_nccl_mail(receipt.comm, receipt.from, fake_nccl_rank(receipt.comm));
    fakes::Await([&mail] { return mail.sent > mail.taken; });
    std::memcpy(receipt.to, mail.letters[mail.taken % mail.kMost], receipt.bytes);
    ++mail.taken;
  });
}

thread_local int group_depth = 0;
thread_local std::vector<Receipt> receipts;  // of the current group: run after everything that it sends

}  // namespace

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return Collective(from, to, comm, stream, Reduction(0, count * kBytes[type], type, op));
}
API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm,
                                   cudaStream_t stream) {
  const size_t bytes = count * kBytes[type];
  return Collective(from, to, comm, stream,
                    Reduction(bytes * static_cast<size_t>(fake_nccl_rank(comm)), bytes, type, op));
}
API ncclResult_t ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm_t comm,
                               cudaStream_t stream) {
  return Collective(from, to, comm, stream, Concatenation(0, count * kBytes[type]));
}
API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, int type, ncclComm_t comm,
                              cudaStream_t stream) {
  const size_t bytes = count * kBytes[type];
  return Collective(from, to, comm, stream, Concatenation(bytes * static_cast<size_t>(fake_nccl_rank(comm)), bytes));
}

API ncclResult_t ncclSend(const void* from, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * kBytes[type];
  return Put(stream, [=] {
    fakes::Mail& mail = *fake_nccl_mail(comm, fake_nccl_rank(comm), peer);
    fakes::Await([&mail] { return mail.sent < mail.taken + mail.kMost; });
    void* const letter = fake_cuda_share(bytes);
    std::memcpy(letter, from, bytes);
    if (void* const before = mail.letters[mail.sent % mail.kMost].exchange(letter)) fake_cuda_unshare(before);
    ++mail.sent;
  });
}
API ncclResult_t ncclRecv(void* to, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
  const Receipt receipt = {to, count * kBytes[type], peer, comm, stream};
  if (group_depth == 0) return Await(receipt);
  receipts.push_back(receipt);
  return ncclSuccess;
}
API ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  if (--group_depth > 0) return ncclSuccess;
  for (const Receipt& receipt : std::exchange(receipts, {})) {
    if (const ncclResult_t result = Await(receipt); result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

// ---- XLA's other calls for communicators

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, void*) {
  return ::ncclCommInitRank(comm, nranks, id, rank);
}
API ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = fake_nccl_nranks(comm);
  return ncclSuccess;
}
API ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
