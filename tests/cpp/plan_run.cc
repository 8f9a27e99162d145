// Plans on hostmp: execution contexts are reused, refusals are heeded. (handler_execute runs them.)
#include <atomic>
#include <memory>
#include <string>

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

// hostmp under another name, with what the real library lacks.
MpApi Strict() {
  MpApi api = host_api();
  api.name = "strict";
  api.fix_reduction_order = nullptr;
  return api;
}

StatusOr<std::shared_ptr<Plan>> MakePlan(const MpApi& api, const Problem& problem) {
  return Plan::Make(api, problem, GetCommunicator({problem.mesh_shape, problem.axes_row, problem.axes_col}));
}

TEST(SlotsAreReusedAndGrowOnlyWithConcurrentCalls) {
  MpApi api = host_api();
  api.Create = CountingCreate;
  handles_made = 0;
  const Problem problem = *MakeProblem(tests::AllReduce(2, 4, 4, 4));
  auto plan = *MakePlan(api, problem);
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

TEST(AnOrderThatTheLibraryLacksIsRefused) {
  static const MpApi strict = Strict();
  const Attributes attributes = tests::With(tests::Local(4, 4, 4), {{"determinism", std::string("batch")}});
  CHECK_EQ(MakePlan(strict, *MakeProblem(attributes)).status().message(),
           "jaxmp: strict cannot keep the order of sums, got determinism batch");
}

TEST(TheLibrarysReasonReachesTheCaller) {
  const Attributes attributes = tests::With(tests::Local(4, 4, 4), {{"epilog", int64_t{3 << 10}}});
  const Status status = MakePlan(host_api(), *MakeProblem(attributes)).status();
  CHECK(!status.ok());
  CHECK(status.message().find("jaxmp: ") == 0);
}

TEST(TheCacheTellsLibrariesApart) {
  PlanCache cache(8);
  static const MpApi strict = Strict();
  const Problem problem = *MakeProblem(tests::Local(4, 4, 4));
  const auto plan = *cache.Get(host_api(), problem);
  CHECK(*cache.Get(host_api(), problem) == plan);
  CHECK(*cache.Get(strict, problem) != plan);
  CHECK_EQ(cache.info().misses, 2);
  CHECK_EQ(cache.info().hits, 1);
}

}  // namespace
}  // namespace jaxmp
