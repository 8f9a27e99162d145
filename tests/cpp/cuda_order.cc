// Calls in a row over a library that keeps only what cuBLASMp and NCCL promise (fakes/cublasmp_product.h): a rank may
// be one call further than its peers, and its messages may come before they have read the last ones.

#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"
#include "csrc/cuda/rank_context.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_gpus.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using namespace tests;  // NOLINT: fake devices
using fake_xla::InstanceOf;

constexpr int kDevices = 4, kBatch = 120;

// All-gathers, reduce-scatters and all-reduces along both axes of a 2 x 2 mesh of these devices.
std::vector<InstanceOf<CudaSite>> Sites(int64_t first_device) {
  std::vector<InstanceOf<CudaSite>> sites;
  for (int64_t axis : {0, 1}) {
    for (const Attributes& call :
         {AllGather(2, 8, 6, 5), ReduceScatter(2, 8, 6, 4),
          With(AllReduce(2, 8, 6, 6), {{"trans_a", std::string("T")}}), AllGather(2, 8, 6, 7)}) {
      sites.push_back(Make(With(call, {{"mesh_shape", std::vector<int64_t>{2, 2}},
                                       {"axes_row", std::vector<int64_t>{axis}},
                                       {"devices", std::vector<int64_t>{first_device, first_device + 1,
                                                                        first_device + 2, first_device + 3}}})));
    }
  }
  return sites;
}

// Counts the calls with a wrong element. Every rank puts a batch of calls on its stream before it waits, and each call
// has numbers of its own.
int CountWrong(int64_t first_device, int calls) {
  const std::vector<InstanceOf<CudaSite>> sites = Sites(first_device);
  int wrong = 0;
  for (int done = 0; done < calls; done += kBatch) {
    std::vector<std::vector<std::unique_ptr<World>>> worlds(kBatch);  // of a call, by group
    const auto site_of = [&](size_t call) -> CudaSite& { return *sites[(call * 5 + call / 7) % sites.size()].site; };
    for (size_t call = 0; call < kBatch; ++call) {
      for (int group : {0, 1}) {
        worlds[call].push_back(
            std::make_unique<World>(site_of(call).plan->problem(), 2 * (done + static_cast<int>(call)) + group));
      }
    }
    OnEach(kDevices, [&](int32_t position) {
      const Gpu& gpu = *machine()[static_cast<size_t>(position)];
      for (size_t call = 0; call < kBatch; ++call) {
        CudaSite& site = site_of(call);
        const GroupRank at = *site.communicator->Locate(position);
        World& world = *worlds[call][static_cast<size_t>(at.group)];
        const auto r = static_cast<size_t>(at.rank);
        std::vector<fake_xla::Buffer> args = {F32(world.a[r]), F32(world.b[r])};
        AddPosition(world.problem, &position, gpu, &args);
        CHECK_EQ(fake_xla::ExecuteOnCuda(site, gpu.ordinal, gpu.stream, args, {F32(world.d[r])}), "");
      }
      CHECK_EQ(Gpu::driver().StreamSynchronize(gpu.stream), abi::CUDA_SUCCESS);
    });
    for (const auto& groups : worlds) wrong += !groups[0]->IsRight() || !groups[1]->IsRight();
  }
  return wrong;
}

int Calls() {
  const char* const calls = std::getenv("FAKE_CUBLASMP_CALLS");
  return calls ? std::atoi(calls) : 1200;
}

TEST(TheMachineStarts) {
  StartMachine();
  cuda::SetTimeout(60);
  setenv("FAKE_CUBLASMP_SEED", "7", 0);
}

// Shows that the tests below can fail: with one buffer for all calls some are wrong, as on one GPU that ranks shared.
TEST(OneBufferMixesCalls) {
  setenv("FAKE_CUBLASMP_ONE_BUFFER", "1", 1);
  cuda::SetWait(cuda::Wait::kNone);
  CHECK(CountWrong(100, 1200) > 0);
  unsetenv("FAKE_CUBLASMP_ONE_BUFFER");
}

TEST(TwoBuffersInTurnDoNotMixCalls) {
  cuda::SetWait(cuda::Wait::kNone);
  CHECK_EQ(CountWrong(200, Calls()), 0);
}

TEST(TheWaitOnTheStreamIsEnoughByItself) {
  setenv("FAKE_CUBLASMP_ONE_BUFFER", "1", 1);
  cuda::SetWait(cuda::Wait::kOnStream);
  CHECK_EQ(CountWrong(300, Calls()), 0);
  unsetenv("FAKE_CUBLASMP_ONE_BUFFER");
}

TEST(TheDefaultDoesNotMixCalls) { CHECK_EQ(CountWrong(400, Calls()), 0); }

TEST(RanksThatShareADeviceWaitOnTheHost) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);  // the fake then refuses a call if the last has not ended
  cuda::SetWait(cuda::Wait::kOnHost);
  CHECK_EQ(CountWrong(500, Calls() / 4), 0);
}

TEST(TheMachineEnds) { machine().clear(); }

}  // namespace
}  // namespace jaxmp
