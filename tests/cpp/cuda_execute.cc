// The custom call on CUDA as XLA:GPU drives it, over fake libraries: one thread a device, streams that lag the
// host, calls that block until every rank has come. What it proves is the order of our calls, not the library's
// answers.

#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"
#include "csrc/plan/plan_cache.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_gpus.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using namespace tests;  // NOLINT: fake devices
using fake_xla::InstanceOf;

TEST(TheMachineStarts) { StartMachine(); }

Attributes TransposedA(Attributes attributes) { return With(std::move(attributes), {{"trans_a", std::string("T")}}); }

TEST(EveryPatternIsRight) {
  for (int64_t nranks : {1, 2, 4}) {
    for (const Attributes& attributes :
         {Local(7, 5, 9), AllGather(nranks, 8, 12, 5), ReduceScatter(nranks, 5, 8, 12),
          TransposedA(AllReduce(nranks, 3, 5, 12)), TransposedA(AllGather(nranks, 4, 4, 300))}) {
      const InstanceOf<CudaSite> instance = Make(attributes);
      const int64_t group = instance.site->plan->nranks();
      for (int run = 0; run < 3; ++run) RunRight(*instance.site, FirstGpus(group), run);
    }
  }
  const Attributes with_c =  // in D's memory
      With(ReduceScatter(2, 4, 6, 8), {{"dtype_c", std::string("f32")}, {"beta", std::vector<double>{2, 0}}});
  for (const Attributes& attributes : {Grid(2, 2, 4, 8, 6), Cyclic(1, 2, 13, 11, 17), with_c}) {
    const InstanceOf<CudaSite> instance = Make(attributes);
    RunRight(*instance.site, FirstGpus(instance.site->plan->nranks()));
  }
}

// The first execution makes everything, in one order on every rank; a later one only runs.
TEST(ALaterExecutionOnlyRuns) {
  const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(2, 4, 6, 8), {4, 5}));
  const std::vector<const Gpu*> gpus = Gpus({4, 5});
  (void)CallsOn(4);
  (void)CallsOn(5);
  RunRight(*instance.site, gpus);
  const std::string first = CallsOn(4);
  CHECK_EQ(CallsOn(5), first);
  CHECK_CONTAINS(first, "GridCreate GridCreate MatrixDescriptorCreate");  // both grids, on one communicator
  CHECK_CONTAINS(first, "Matmul_bufferSize BufferRegister BufferRegister Matmul ");
  RunRight(*instance.site, gpus, 1);
  CHECK_EQ(CallsOn(4), "Matmul ~Matmul ");
  CHECK_EQ(CallsOn(5), "Matmul ~Matmul ");
  // Another site of the same problem shares the plan, and with it all of that.
  const InstanceOf<CudaSite> other = Make(OnDevices(AllGather(2, 4, 6, 8), {4, 5}));
  CHECK(other.site->plan == instance.site->plan);
  RunRight(*other.site, gpus, 2);
  CHECK_EQ(CallsOn(4), "Matmul ~Matmul ");
}

std::string DriverCallsOn(int device) {
  static auto* const log = FakeFunction<decltype(fake_cuda_log)>("right/libcuda.so.1", "fake_cuda_log");
  return log(device);
}

// Next to the libraries' own work there is nothing for one rank; for several ranks there are two events, which tell the
// watchdog the time of a call. No copy, no memset, no wait.
TEST(ALaterExecutionPutsLittleOnTheDevice) {
  const std::pair<Attributes, const char*> cases[] = {
      {Local(6, 5, 4), ""},
      {OnDevices(AllGather(2, 4, 6, 8), {4, 5}), "EventRecord EventRecord "},
      {OnDevices(ReduceScatter(2, 4, 6, 8), {4, 5}), "EventRecord EventRecord "},
      {AllGather(2, 4, 6, 8), "EventRecord EventRecord "}};  // not even a copy of a position argument
  for (const auto& [attributes, expected] : cases) {
    const InstanceOf<CudaSite> instance = Make(attributes);
    const bool is_local = instance.site->plan->nranks() == 1;
    const std::vector<const Gpu*> gpus = is_local                                         ? Gpus({4})
                                         : instance.site->plan->problem().devices.empty() ? FirstGpus(2)
                                                                                          : Gpus({4, 5});
    for (int run = 0; run < 3; ++run) {
      for (const Gpu* gpu : gpus) (void)DriverCallsOn(gpu->ordinal);
      RunRight(*instance.site, gpus, run);
      if (run == 0) continue;
      for (const Gpu* gpu : gpus)
        CHECK_EQ(DriverCallsOn(gpu->ordinal), std::string(expected) + "StreamSynchronize ");  // the test's own
    }
  }
}

// Without an event after every call, a call on another stream still has to wait for the last one, also when its
// stream is gone.
TEST(CallsWithoutPeersMayChangeStreams) {
  const InstanceOf<CudaSite> instance = Make(Local(200, 200, 200));
  const Gpu& gpu = *machine()[6];
  std::vector<std::unique_ptr<World>> worlds;
  for (int call = 0; call < 6; ++call) {
    worlds.push_back(std::make_unique<World>(instance.site->plan->problem(), call));
    World& world = *worlds.back();
    const abi::CUstream stream = gpu.NewStream();
    CHECK_EQ(fake_xla::ExecuteOnCuda(*instance.site, 6, stream, {F32(world.a[0]), F32(world.b[0])}, {F32(world.d[0])}),
             "");
    if (call < 3) continue;
    CHECK_EQ(Gpu::driver().StreamSynchronize(stream), abi::CUDA_SUCCESS);  // so all before it are over
    for (const auto& each : worlds) CHECK(each->IsRight());
    CHECK_EQ(Gpu::driver().StreamDestroy_v2(stream), abi::CUDA_SUCCESS);
  }
}

// A program that names its devices knows its ranks by the ids that this process gave them.
TEST(DevicesAreKnownByTheirIds) {
  const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(2, 4, 6, 8), {91, 92}));
  const auto error = [&](const std::map<int, int64_t>& ids) {
    cuda::SetDeviceIds(ids);
    World world(instance.site->plan->problem());
    const Gpu& gpu = *machine()[7];
    return fake_xla::ExecuteOnCuda(*instance.site, 7, gpu.stream, {F32(world.a[0]), F32(world.b[0])},
                                   {F32(world.d[0])});
  };
  CHECK_CONTAINS(error({{6, 91}}),
                 "jaxmp: the id of CUDA device 7 is not known in this process; call jaxmp.register()");
  CHECK_CONTAINS(error({{7, 90}}), "compiled for a mesh of the devices 91-92, but runs on device 90; compile it");
  RunRight(*instance.site, Gpus({7, 6}));
}

TEST(PointersAreAttributes) {
  const InstanceOf<CudaSite> instance = Make(
      With(OnDevices(AllGather(2, 4, 6, 8), {4, 5}), {{"epilog", int64_t{4}}, {"dtype_bias", std::string("f32")}}));
  for (int run = 0; run < 2; ++run) {
    World world(instance.site->plan->problem(), run);
    std::vector<std::vector<float>> bias(2, std::vector<float>{static_cast<float>(run), 10});
    (void)CallsOn(4);
    OnEach(2, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      const Gpu& gpu = *machine()[4 + r];
      std::vector<fake_xla::Buffer> args = {F32(world.a[r]), F32(world.b[r]), F32(bias[r])};
      AddPosition(world.problem, &rank, gpu, &args);
      CHECK_EQ(fake_xla::ExecuteOnCuda(*instance.site, gpu.ordinal, gpu.stream, args, {F32(world.d[r])}), "");
      CHECK_EQ(Gpu::driver().StreamSynchronize(gpu.stream), abi::CUDA_SUCCESS);
      std::vector<float> expected = world.Expected(rank);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += bias[r][i % 2];
      CHECK(world.d[r] == expected);
    });
    if (run == 1) CHECK_EQ(CallsOn(4), "SetAttribute Matmul ~Matmul ");
  }
}

// A handle, a communicator and grids serve every plan of a rank; two workspaces serve every plan with D on one grid.
TEST(PlansShareWhatARankHas) {
  const std::vector<const Gpu*> gpus = Gpus({6, 7});
  const auto run = [&](int64_t m, int64_t k) {
    const InstanceOf<CudaSite> instance = Make(OnDevices(AllGather(2, m, 4, k), {6, 7}));
    RunRight(*instance.site, gpus);
    CHECK_EQ(CallsOn(6).size(), CallsOn(7).size());
    return instance.site->plan->device_workspace(0);
  };
  (void)CallsOn(6);
  (void)CallsOn(7);
  const size_t small = run(4, 8);
  CHECK(small > 0);
  const InstanceOf<CudaSite> large = Make(OnDevices(AllGather(2, 512, 512, 512), {6, 7}));
  (void)CallsOn(6);
  RunRight(*large.site, gpus);
  CHECK(large.site->plan->device_workspace(0) > small);
  const std::string grown = CallsOn(6);
  CHECK_CONTAINS(grown, "Matmul_bufferSize BufferDeregister BufferDeregister BufferRegister BufferRegister Matmul");
  CHECK(grown.find("GridCreate") == std::string::npos);
  CHECK(grown.find("Create ") != std::string::npos && grown.find(" Create ") == std::string::npos);  // of descriptors
  (void)CallsOn(7);
  const InstanceOf<CudaSite> again = Make(OnDevices(AllGather(2, 8, 4, 8), {6, 7}));
  RunRight(*again.site, gpus);
  CHECK(CallsOn(6).find("BufferRegister") == std::string::npos);
}

// In a mesh of 2 x 2 the second axis spans two groups, which multiply at the same time.
TEST(GroupsDoNotMix) {
  const InstanceOf<CudaSite> instance = Make(With(
      ReduceScatter(2, 4, 6, 8), {{"mesh_shape", std::vector<int64_t>{2, 2}}, {"axes_row", std::vector<int64_t>{1}}}));
  World worlds[] = {World(instance.site->plan->problem(), 0), World(instance.site->plan->problem(), 1)};
  for (int run = 0; run < 5; ++run) {
    OnEach(4, [&](int position) {
      const auto p = static_cast<size_t>(position);
      CHECK_EQ(RunRank(*instance.site, worlds[p / 2], *machine()[p], position, p % 2), "");
    });
    CHECK(worlds[0].IsRight() && worlds[1].IsRight());
  }
}

// A rank that two meshes have on one device must not take the other mesh's communicator.
TEST(MeshesOverOtherDevicesDoNotMix) {
  const Attributes attributes = AllGather(2, 4, 6, 8);
  for (const std::vector<int64_t>& devices : {std::vector<int64_t>{0, 1}, {1, 0}, {0, 2}, {2, 1}}) {
    const InstanceOf<CudaSite> instance = Make(OnDevices(attributes, devices));
    RunRight(*instance.site, Gpus({static_cast<size_t>(devices[0]), static_cast<size_t>(devices[1])}));
  }
  // If the devices are not known, the first that come are the mesh.
  const InstanceOf<CudaSite> unknown = Make(AllGather(2, 4, 6, 8));
  RunRight(*unknown.site, Gpus({0, 1}));
  const InstanceOf<CudaSite> elsewhere = Make(With(AllGather(2, 4, 6, 8), {{"alpha", std::vector<double>{2, 0}}}));
  World world(elsewhere.site->plan->problem());
  for (const std::string& error : RunAll(*elsewhere.site, world, Gpus({2, 3}))) {
    CHECK_CONTAINS(error, "has its communicator on that device, but this call runs on device ");
    CHECK_CONTAINS(error, "compile it in this process instead");
  }
}

// The host runs before the streams, and two sites alternate: every rank still meets its peers call by call.
TEST(CallsOnTheirWayKeepTheirOrder) {
  const Attributes attributes[] = {AllGather(3, 6, 6, 10), ReduceScatter(3, 6, 6, 12)};
  const InstanceOf<CudaSite> sites[] = {Make(attributes[0]), Make(attributes[1])};
  std::vector<std::unique_ptr<World>> worlds;
  for (int call = 0; call < 40; ++call) {
    worlds.push_back(std::make_unique<World>(*MakeProblem(attributes[call % 2]), call));
  }
  OnEach(3, [&](int32_t rank) {
    const auto r = static_cast<size_t>(rank);
    const Gpu& gpu = *machine()[r];
    for (size_t call = 0; call < worlds.size(); ++call) {
      World& world = *worlds[call];
      const std::vector<fake_xla::Buffer> args = {F32(world.a[r]), F32(world.b[r]), {XLA_FFI_DataType_S32, {}, &rank}};
      CHECK_EQ(fake_xla::ExecuteOnCuda(*sites[call % 2].site, gpu.ordinal, gpu.stream, args, {F32(world.d[r])}), "");
    }
    CHECK_EQ(Gpu::driver().StreamSynchronize(gpu.stream), abi::CUDA_SUCCESS);
  });
  for (const auto& world : worlds) CHECK(world->IsRight());
}

TEST(TwoThreadsOnOneDeviceTakeTurns) {
  const InstanceOf<CudaSite> instance = Make(Local(9, 9, 9));
  const Gpu& gpu = *machine()[3];
  const abi::CUstream streams[] = {gpu.stream, gpu.NewStream()};
  OnEach(2, [&](int thread) {
    for (int call = 0; call < 20; ++call) {
      World world(instance.site->plan->problem(), call);
      const std::vector<fake_xla::Buffer> args = {F32(world.a[0]), F32(world.b[0])};
      CHECK_EQ(fake_xla::ExecuteOnCuda(*instance.site, 3, streams[thread], args, {F32(world.d[0])}), "");
      CHECK_EQ(Gpu::driver().StreamSynchronize(streams[thread]), abi::CUDA_SUCCESS);
      CHECK(world.IsRight());
    }
  });
  RunRight(*instance.site, Gpus({3}));  // after the other stream, because that is about to go
  CHECK_EQ(Gpu::driver().StreamDestroy_v2(streams[1]), abi::CUDA_SUCCESS);
}

// The objects of a plan go with it; objects that ranks share stay.
TEST(APlanTakesItsObjectsWithIt) {
  static auto* const live = FakeFunction<decltype(fake_cublasmp_live)>("right/libcublasmp.so.0", "fake_cublasmp_live");
  plan_cache().Clear();
  const int before = live();
  for (int64_t k = 1; k <= 3; ++k) {
    const InstanceOf<CudaSite> instance = Make(AllGather(2, 4, 6, k));
    RunRight(*instance.site, FirstGpus(2));
    CHECK_EQ(live(), before + 2 * 4);  // three matrices and a product on each rank
    plan_cache().Clear();
    CHECK_EQ(live(), before + 2 * 4);  // the site has it still
  }
  CHECK_EQ(live(), before);
}

// One of two processes has lost its plan of the problem (by an eviction, by plan_cache_clear, with an executable) and
// makes it again: no step may be collective, because the other still has its own.
TEST(APlanMadeAgainWaitsForNobody) {
  const Attributes attributes = OnDevices(AllGather(2, 4, 6, 12), {4, 5});
  const InstanceOf<CudaSite> kept = Make(attributes);
  RunRight(*kept.site, Gpus({4, 5}));
  plan_cache().Clear();
  const InstanceOf<CudaSite> again = Make(attributes);
  CHECK(again.site->plan != kept.site->plan);
  cuda::SetTimeout(2);
  World world(kept.site->plan->problem(), 1);
  OnEach(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    CHECK_EQ(RunRank(rank == 0 ? *kept.site : *again.site, world, *machine()[4 + r], rank, r), "");
  });
  CHECK(world.IsRight());
  cuda::SetTimeout(60);
}

// 3 rows of a mask have 16 bytes a column; what the library does not write is 0 all the same.
TEST(AuxIsWrittenCompletely) {
  const InstanceOf<CudaSite> instance =
      Make(With(Local(3, 2, 4), {{"epilog", int64_t{130}}, {"dtype_aux", std::string("u8")}}));
  World world(instance.site->plan->problem());
  std::vector<unsigned char> aux(32, 0xff);
  const fake_xla::Buffer mask = {XLA_FFI_DataType_U8, {32}, aux.data()};
  const Gpu& gpu = *machine()[0];
  CHECK_EQ(fake_xla::ExecuteOnCuda(*instance.site, 0, gpu.stream, {F32(world.a[0]), F32(world.b[0])},
                                   {F32(world.d[0]), mask}),
           "");
  CHECK_EQ(Gpu::driver().StreamSynchronize(gpu.stream), abi::CUDA_SUCCESS);
  for (size_t i = 0; i < aux.size(); ++i) CHECK(i % 16 == 0 ? aux[i] < 8 : aux[i] == 0);
}

TEST(EmptyProductsRunNothing) {
  const InstanceOf<CudaSite> instance = Make(AllGather(2, 0, 4, 4));
  World world(instance.site->plan->problem());
  (void)CallsOn(0);
  CHECK_EQ(RunRank(*instance.site, world, *machine()[0], 0, 0), "");  // no peer needed
  CHECK_EQ(CallsOn(0), "");
}

// If ranks do not reach each other's memory, a workspace is the driver's, and cuBLASMp does without overlap; every rank
// then refuses an algorithm that overlaps, if it is asked for by name.
TEST(AWorkspaceNeedsNoSymmetricMemory) {
  setenv("FAKE_CUBLASMP_SYMMETRIC", "0", 1);
  const std::vector<int64_t> devices = {70, 71};  // a communicator of its own, without a workspace yet
  auto* const allocations =
      FakeFunction<decltype(fake_cuda_allocations)>("right/libcuda.so.1", "fake_cuda_allocations");
  const InstanceOf<CudaSite> small = Make(OnDevices(AllGather(2, 4, 6, 8), devices));
  RunRight(*small.site, FirstGpus(2));
  const int before = allocations();
  const InstanceOf<CudaSite> large = Make(OnDevices(AllGather(2, 40, 60, 8), devices));
  RunRight(*large.site, FirstGpus(2));
  CHECK_EQ(allocations(), before);  // the larger one took the smaller one's place
  const InstanceOf<CudaSite> asked =
      Make(OnDevices(With(AllGather(2, 4, 6, 8), {{"algorithm", std::string("split_p2p")}}), devices));
  World world(asked.site->plan->problem());
  for (const std::string& error : RunAll(*asked.site, world, FirstGpus(2))) {
    CHECK_CONTAINS(error, "jaxmp: cublasmp Matmul: [cublasMpMatmul] this algorithm needs a registered workspace; rank");
  }
  RunRight(*small.site, FirstGpus(2), 1);
  unsetenv("FAKE_CUBLASMP_SYMMETRIC");
}

// Operands on grids of different orders may keep the library off its local product.
TEST(OneRankMultipliesLocally) {
  cuda::SetLogging(true);
  (void)cuda::TakeLog();
  for (const Attributes& attributes : {Local(7, 5, 9), AllGather(1, 8, 12, 5), ReduceScatter(1, 5, 8, 12),
                                       TransposedA(AllReduce(1, 3, 5, 12)), Grid(1, 1, 4, 8, 6)}) {
    const InstanceOf<CudaSite> instance = Make(attributes);
    RunRight(*instance.site, FirstGpus(1));
    const std::vector<std::string> lines = cuda::TakeLog();
    CHECK_EQ(lines.size(), size_t{1});
    for (const std::string& line : lines) CHECK_EQ(line, "[cublasMpMatmul] Using local Matmul");
  }
  cuda::SetLogging(false);
  RunRight(*Make(Local(7, 5, 9)).site, FirstGpus(1));
  CHECK(cuda::TakeLog().empty());
}

TEST(OneRankGetsNoHints) {
  const auto count = [](const Attributes& attributes) {
    const InstanceOf<CudaSite> instance = Make(attributes);
    (void)CallsOn(0);
    RunRight(*instance.site, FirstGpus(1));
    const std::string calls = CallsOn(0), name = "SetAttribute";
    int found = 0;
    for (size_t at = 0; (at = calls.find(name, at)) != std::string::npos; at += name.size()) ++found;
    return found;
  };
  const Attributes plain = TransposedA(AllReduce(1, 4, 6, 10));
  const Attributes hinted = With(plain, {{"algorithm", std::string("fused")},
                                         {"comm_sm_count", int64_t{8}},
                                         {"communication_dtype", std::string("f32")}});
  const int expected = count(plain);
  CHECK(expected > 0);
  CHECK_EQ(count(hinted), expected);
}

TEST(TheMachineEnds) { machine().clear(); }

}  // namespace
}  // namespace jaxmp
