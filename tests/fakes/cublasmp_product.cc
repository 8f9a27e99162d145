#include "tests/fakes/cublasmp_product.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/hostmp/handles/runtime.h"
#include "csrc/hostmp/numeric/dtypes.h"
#include "tests/cpp/threads.h"
#include "tests/fakes/fake.h"

namespace fakes {
namespace {

using jaxmp::hostmp::AsStream;

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "fake cublasmp: %s\n", why.c_str());
  std::abort();  // a device that fails, which no test expects
}

cublasMpStatus_t Start(Arguments* x, cudaStream_t stream) {
  cublasMpHandle_t handle = nullptr;
  (void)host().Create(&handle, stream);
  cublasMpMatmulDescriptor matmul{x->values, x->is_set, x->fixed_reduction_order, nullptr};
  const cublasMpStatus_t status =
      host().Matmul(handle, &matmul, x->m, x->n, x->k, x->alpha.data(), x->a, x->ia, x->ja, &x->desc_a, x->b, x->ib,
                    x->jb, &x->desc_b, x->beta.data(), x->c, x->ic, x->jc, x->has_c ? &x->desc_c : nullptr, x->d, x->id,
                    x->jd, &x->desc_d, x->work, x->bytes, nullptr, 0);
  (void)host().Destroy(handle);
  return status;
}

// Runs hostmp's product of all ranks, because their memory is the host's.
void Multiply(const jaxmp::hostmp::Group& group, const std::vector<Arguments*>& ranks) {
  jaxmp::hostmp::Rendezvous rendezvous;
  jaxmp::test::Streams streams(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Arguments x = *ranks[rank];
    for (auto* desc : {&x.desc_a, &x.desc_b, &x.desc_c, &x.desc_d}) {
      desc->grid.comm = *group.comm(static_cast<int>(rank));  // of this process
    }
    if (Start(&x, AsStream(streams.start(rank, &rendezvous))) != CUBLASMP_STATUS_SUCCESS) Fail(host().last_error());
  }
  streams.wait();
  for (const std::string& error : streams.errors) {
    if (!error.empty()) Fail(error);
  }
}

// ---- with FAKE_CUBLASMP_SEED

size_t BytesOf(const cublasMpMatrixDescriptor& desc, int64_t rank) {
  const int64_t columns = jaxmp::hostmp::LocalExtent(desc.cols, jaxmp::hostmp::ColOf(desc.grid, rank));
  return static_cast<size_t>(jaxmp::hostmp::BytesOf(desc.type, desc.lld * columns));
}

// Copies a rank's arguments and operands, as they are now, to the memory of the job. The copy stands for the rank's
// blocks, or for its partial sums.
Arguments* Copy(const Arguments& x, int rank) {
  const size_t bytes[] = {BytesOf(x.desc_a, rank), BytesOf(x.desc_b, rank), x.has_c ? BytesOf(x.desc_c, rank) : 0};
  auto* const made = new (fake_cuda_share(sizeof(Arguments) + bytes[0] + bytes[1] + bytes[2])) Arguments(x);
  char* at = reinterpret_cast<char*>(made + 1);
  const void** operands[] = {&made->a, &made->b, &made->c};
  for (size_t i = 0; i < 3; ++i) {
    if (bytes[i] == 0) continue;
    std::memcpy(at, *operands[i], bytes[i]);
    *operands[i] = at;
    at += bytes[i];
  }
  return made;
}

bool IsOneCall(const Arguments& x, const Arguments& y) {
  return x.m == y.m && x.n == y.n && x.k == y.k && x.values == y.values && x.desc_d.grid.nprow == y.desc_d.grid.nprow;
}

// One rank's calls on one communicator, on its stream.
struct Sequence {
  uint64_t call = 0, drawn = 0;
  std::deque<Arguments*> sent;  // a peer may still read these

  void Keep(Arguments* message) {
    constexpr size_t kMost = 64;  // no rank lags so many calls
    sent.push_back(message);
    if (sent.size() <= kMost) return;
    fake_cuda_unshare(sent.front());
    sent.pop_front();
  }
  // Delays are mostly short, at times longer than a call takes.
  void Delay(int rank) {
    const uint64_t seed = static_cast<uint64_t>(Knob("FAKE_CUBLASMP_SEED", 0));
    const uint64_t x = Hash(seed * 1000003 + call * 8191 + static_cast<uint64_t>(rank) * 131 + ++drawn);
    if (x % 2) return;
    std::this_thread::sleep_for(std::chrono::microseconds(x % 16 ? x / 16 % 20 : x / 16 % 400));
  }
  static uint64_t Hash(uint64_t x) {
    for (int i = 0; i < 2; ++i) x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    return x ^ x >> 32;
  }
};

Sequence& SequenceOf(ncclComm_t comm) {
  static auto* const all = new std::map<ncclComm_t, Sequence>;
  std::lock_guard<std::mutex> lock(state().mutex);
  return (*all)[comm];
}

// The place of a sender's message in an owner's workspace.
std::atomic<Arguments*>& Slot(const Windows& windows, int owner, int sender) {
  return reinterpret_cast<std::atomic<Arguments*>*>(windows[static_cast<size_t>(owner)])[sender];
}

// True for a plain matrix product. All other data that a rank reads or writes is at addresses in its attributes.
bool IsPlain(const Arguments& x) {
  constexpr int kPointers[] = {
      CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER,
      CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_POINTER, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER,
      CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER,  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_POINTER};
  for (int pointer : kPointers) {
    if (x.values[static_cast<size_t>(pointer)]) return false;
  }
  return (x.values[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE] & ~uint64_t{CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE}) == 0;
}

}  // namespace

void Product::Run(void* data) {
  const std::unique_ptr<Product> product(static_cast<Product*>(data));
  Log(product->ordinal, "~Matmul");
  const Arguments& x = *product->arguments;
  const bool is_late = Knob("FAKE_CUBLASMP_SEED", 0) != 0 && fake_nccl_nranks(product->comm) > 1;
  is_late&& IsPlain(x) && IsRegistered(x.work) ? product->Exchange() : product->Compute();
  fake_cuda_unshare(product->arguments);
  std::lock_guard<std::mutex> lock(state().mutex);
  --state().running[product->comm];
}

// Fails if ranks that share a GPU begin a call before the last one ended: the real library's ranks do not wait for it.
void Product::Count() const {
  std::lock_guard<std::mutex> lock(state().mutex);
  const bool is_shared = Knob("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0 && fake_nccl_nranks(comm) > 1;
  if (++state().running[comm] > 1 && is_shared) Fail("ranks that share a GPU have begun a call before the last ended");
}

void Product::Compute() const {
  std::array<long long, kFakeMostRanks> given{};  // NOLINT
  fake_nccl_gather(comm, kFakeOnStream, reinterpret_cast<long long>(arguments), given.data());
  if (fake_nccl_rank(comm) == 0) {
    std::vector<Arguments*> ranks;
    for (size_t rank = 0; rank < static_cast<size_t>(fake_nccl_nranks(comm)); ++rank) {
      ranks.push_back(reinterpret_cast<Arguments*>(given[rank]));
    }
    Multiply(GroupOf(comm), ranks);
  }
  fake_nccl_gather(comm, kFakeOnStream, 0, given.data());
}

void Product::Exchange() const {
  const int rank = fake_nccl_rank(comm), nranks = fake_nccl_nranks(comm);
  const Windows windows = WindowsOf(arguments->work, comm);
  Sequence& sequence = SequenceOf(comm);
  sequence.Delay(rank);
  Arguments* const own = Copy(*arguments, rank);
  const bool is_fetched = Sequence::Hash(sequence.call) % 2;  // the same on all ranks
  for (int peer = 0; peer < nranks; ++peer) {
    Slot(windows, is_fetched ? rank : peer, rank) = own;
    fake_nccl_signal(comm, peer);
    sequence.Delay(rank);
  }
  fake_nccl_await_signals(comm, ++sequence.call);
  std::vector<Arguments> ranks;
  std::vector<std::vector<char>> scratch;  // hostmp's workspaces, and the peers' results, which are not read
  bool is_one_call = true;
  for (int peer = 0; peer < nranks; ++peer) {
    sequence.Delay(rank);
    ranks.push_back(peer == rank ? *own : *Slot(windows, is_fetched ? peer : rank, peer).load());
    is_one_call = is_one_call && IsOneCall(ranks.back(), *own);
    scratch.emplace_back(BytesOf(ranks.back().desc_d, peer) + own->bytes + 512);
    const auto at = (reinterpret_cast<uintptr_t>(scratch.back().data()) + 255) / 256 * 256;
    ranks.back().work = reinterpret_cast<void*>(at);
    if (peer != rank) ranks.back().d = reinterpret_cast<void*>(at + (own->bytes + 255) / 256 * 256);
  }
  sequence.Keep(own);
  std::vector<Arguments*> pointers;
  for (Arguments& each : ranks) pointers.push_back(&each);
  if (is_one_call) return Multiply(GroupOf(comm), pointers);
  std::memset(arguments->d, 0xff, BytesOf(arguments->desc_d, rank));  // of other shapes: no number
}

}  // namespace fakes
