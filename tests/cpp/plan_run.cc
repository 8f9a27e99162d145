// Plans on hostmp: what is made once and shared. (handler_execute runs them.)

#include "csrc/plan/plan.h"
#include "csrc/plan/plan_cache.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

std::atomic<int> handles_made{0};

abi::cublasMpStatus_t CountingCreate(abi::cublasMpHandle_t* handle, abi::cudaStream_t stream) {
  ++handles_made;
  return host_api().Create(handle, stream);
}

TEST(SlotsAreReusedAndGrowOnlyWithConcurrentCalls) {
  MpApi api = host_api();
  api.Create = CountingCreate;
  handles_made = 0;
  const Problem problem = *MakeProblem(tests::AllReduce(2, 4, 4, 4));
  auto plan = *Plan::Make(api, problem, GetCommunicator({problem.mesh_shape, problem.axes_row, problem.axes_col}));
  CHECK_EQ(handles_made.load(), 2);  // one a rank, made for the workspace query
  for (int run = 0; run < 5; ++run) {
    for (int rank = 0; rank < 2; ++rank) CHECK(plan->Take(rank, {}, nullptr).ok());
  }
  CHECK_EQ(handles_made.load(), 2);
  {
    const Plan::ExecutionHandle held = *plan->Take(0, {}, nullptr), another = *plan->Take(0, {}, nullptr);
    CHECK_EQ(handles_made.load(), 3);
  }
  const Plan::ExecutionHandle again = *plan->Take(0, {}, nullptr), more = *plan->Take(0, {}, nullptr);
  CHECK_EQ(handles_made.load(), 3);
}

TEST(TheCacheTellsLibrariesApart) {
  PlanCache cache(8);
  static const MpApi another = host_api();
  const Problem problem = *MakeProblem(tests::Local(4, 4, 4));
  const auto plan = *cache.Get(host_api(), problem);
  CHECK(*cache.Get(host_api(), problem) == plan);
  CHECK(*cache.Get(another, problem) != plan);
  CHECK_EQ(cache.info().misses, 2);
  CHECK_EQ(cache.info().hits, 1);
}

TEST(OneCommunicatorForAsLongAsItIsHeld) {
  const Axes axes = {{4, 2}, {0}, {}};
  const auto first = GetCommunicator(axes);
  CHECK(GetCommunicator(axes) == first);
  CHECK(GetCommunicator({{4, 2}, {1}, {}}) != first);
  std::vector<std::shared_ptr<const Communicator>> made(4);
  std::vector<std::thread> threads;
  for (auto& communicator : made) threads.emplace_back([&] { communicator = GetCommunicator({{7}, {0}, {}}); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& communicator : made) CHECK(communicator == made[0]);
}

}  // namespace
}  // namespace jaxmp
