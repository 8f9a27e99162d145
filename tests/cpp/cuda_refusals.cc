// The messages of a call on CUDA when something is wrong, on every rank: over fake libraries, which fail when a test
// wants them to.
#include <chrono>

#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_gpus.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using namespace tests;  // NOLINT: fake devices
using fake_xla::InstanceOf;

TEST(TheMachineStarts) { StartMachine(); }

TEST(BuffersAreChecked) {
  const InstanceOf<CudaSite> instance = Make(Local(4, 6, 8));
  World world(instance.site->plan->problem());
  const auto error = [&](std::vector<fake_xla::Buffer> args) {
    return fake_xla::ExecuteOnCuda(*instance.site, 0, machine()[0]->stream, std::move(args), {F32(world.d[0])});
  };
  CHECK_EQ(error({F32(world.b[0]), F32(world.b[0])}),
           "jaxmp: a must hold 32 elements of f32 on each device, got local shape (48)");
  CHECK_EQ(error({F32(world.a[0])}), "jaxmp: argument b is missing");
}

// The library's status, its own words, the rank and the problem; and nothing is left.
TEST(AFailedCallSaysEverything) {
  const InstanceOf<CudaSite> instance = Make(Local(3, 3, 4));
  World world(instance.site->plan->problem());
  FailNext("Matmul", 1, abi::CUBLASMP_STATUS_NOT_SUPPORTED);
  const std::string error = RunRank(*instance.site, world, *machine()[1], 0, 0);
  CHECK_CONTAINS(
      error,
      "jaxmp: cublasmp Matmul: [cublasMpMatmul] a cause; [cublasMpMatmul] as the test wants it; rank 0 of 1 in group 1 "
      "(device 1), call [pattern=local m=3 n=3 k=4 ");
  RunRight(*instance.site, Gpus({1}));
}

// A rank that fails on its own, while the plan is made, takes the others with it: none waits for it on the device.
TEST(OneRankThatCannotPrepareStopsAll) {
  const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(2, 4, 6, 10), {4, 5}));
  for (const char* call : {"Matmul_bufferSize", "MatrixDescriptorCreate", "MatmulDescriptorCreate"}) {
    World world(instance.site->plan->problem());
    FailNext(call, 5, abi::CUBLASMP_STATUS_ALLOCATION_FAILED);
    const std::vector<std::string> errors = RunAll(*instance.site, world, Gpus({4, 5}));
    CHECK_CONTAINS(errors[1], std::string("jaxmp: cublasmp ") + call + ": ");
    CHECK_CONTAINS(errors[0], "another rank of the group could not prepare this call; its own error says why");
  }
  RunRight(*instance.site, Gpus({4, 5}));
}

// Memory that runs out on one rank is an error on all, and no rank waits for the other in a registration.
TEST(OneRankWithoutMemoryStopsAll) {
  static auto* const exhaust = FakeFunction<decltype(fake_nccl_exhaust)>("right/libnccl.so.2", "fake_nccl_exhaust");
  static auto* const allocations =
      FakeFunction<decltype(fake_cuda_allocations)>("right/libcuda.so.1", "fake_cuda_allocations");
  const std::vector<int64_t> devices = {80, 81};  // a communicator of its own, without a workspace yet
  const auto fails = [&](int64_t extent, int times) {
    const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(2, extent, extent, 8), devices));
    World world(instance.site->plan->problem());
    exhaust(5, times);
    const std::vector<std::string> errors = RunAll(*instance.site, world, Gpus({4, 5}));
    CHECK_CONTAINS(errors[1], "jaxmp: no memory for a workspace of ");
    CHECK_CONTAINS(errors[1], " bytes: ncclMemAlloc: ");
    CHECK_CONTAINS(errors[0], "another rank of the group has no memory for a workspace of ");
  };
  const auto runs = [&](int64_t extent) {
    const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(2, extent, extent, 8), devices));
    RunRight(*instance.site, Gpus({4, 5}));
  };
  cuda::SetTimeout(2);
  const int before = allocations();
  fails(4, 1);
  const int with_communicator = allocations();
  CHECK_EQ(with_communicator, before + 2);  // what either rank compares, and no workspace
  runs(4);
  CHECK_EQ(allocations(), with_communicator + 4);
  exhaust(5, 1);
  runs(8);  // replaces the old one; there was no room for both
  CHECK_EQ(allocations(), with_communicator + 4);
  fails(16, 2);
  CHECK_EQ(allocations(), with_communicator);
  runs(4);
  runs(16);
  CHECK_EQ(allocations(), with_communicator + 4);
  cuda::SetTimeout(60);
}

// The ids travel through the exchange that the process was given, under keys that name mesh, devices, group and rank.
TEST(IdsTravelThroughTheExchange) {
  static std::mutex mutex;
  static std::condition_variable changed;
  static std::map<std::string, std::string> values;
  cuda::SetExchange([](const std::string& key, const std::string* value, double timeout) -> StatusOr<std::string> {
    std::unique_lock<std::mutex> lock(mutex);
    if (value) values[key] = *value;
    changed.notify_all();
    changed.wait_for(lock, std::chrono::duration<double>(timeout), [&] { return values.count(key) > 0; });
    return values[key];
  });
  const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(3, 6, 6, 10), {5, 6, 7}));
  RunRight(*instance.site, Gpus({5, 6, 7}));
  cuda::SetExchange({});
  const std::string key = "jaxmp/nccl/mesh 3/axes 0 by /devices 5-6-7/group 0/0";
  CHECK_EQ(values.size(), size_t{3});
  CHECK_EQ(values[key].size(), size_t{129});
  CHECK_EQ(values[key + "/1"], "here");
  CHECK_EQ(values[key + "/2"], "here");
}

// A rank that does not come in time is named on every rank, and the next attempt starts afresh.
TEST(ALateRankIsNamed) {
  const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(3, 6, 6, 10), {0, 3, 4}));
  const std::vector<const Gpu*> gpus = Gpus({0, 3, 4});
  cuda::SetTimeout(0.2);
  World world(instance.site->plan->problem());
  OnEach(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    CHECK_CONTAINS(
        RunRank(*instance.site, world, *gpus[r], rank, r),
        "jaxmp: rank 2 of 3 did not come to its first call within 0.8 s (no thread of this process published "
        "it); set JAXMP_TIMEOUT to wait longer");
  });
  CHECK_CONTAINS(RunRank(*instance.site, world, *gpus[2], 2, 2), "rank 2 of 3 did not come");
  cuda::SetTimeout(60);
  RunRight(*instance.site, gpus);
}

// Two processes with different programs get an error that names both calls, before anything waits for a peer.
TEST(RanksInDifferentCallsNameBoth) {
  const InstanceOf<CudaSite> sites[] = {Make(OnDevices(AllGather(2, 4, 6, 8), {60, 61})),
                                        Make(OnDevices(ReduceScatter(2, 4, 6, 12), {60, 61}))};
  World worlds[] = {World(sites[0].site->plan->problem()), World(sites[1].site->plan->problem())};
  OnEach(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const std::string error = RunRank(*sites[r].site, worlds[r], *machine()[6 + r], rank, r);
    const std::string calls[] = {"call 1 of the group: [pattern=all_gather m=4 n=6 k=8 ",
                                 "call 1 of the group: [pattern=reduce_scatter m=4 n=6 k=12 "};
    CHECK_CONTAINS(error, "jaxmp: the ranks of a group have come to different calls; this rank to " + calls[r]);
    CHECK_CONTAINS(error, "; another one to " + calls[1 - r]);
  });
  RunRight(*sites[0].site, Gpus({6, 7}));
}

TEST(AttributesAreRefused) {
  const auto refusal = [](const Attributes& attributes) { return fake_xla::InstantiateOnCuda(attributes).error; };
  CHECK_CONTAINS(refusal(With(Local(4, 4, 4), {{"determinism", std::string("batch")}})),
                 "jaxmp: cublasmp cannot keep the order of sums");
  CHECK_CONTAINS(refusal(OnDevices(AllGather(2, 4, 4, 4), {0})),
                 "attribute devices must be empty or name the 2 devices of mesh_shape; got 1");
}

TEST(TheMachineEnds) { machine().clear(); }

}  // namespace
}  // namespace jaxmp
