// Plans on hostmp: a used plan answers as a fresh one, execution contexts are reused, refusals are
// heeded.
#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/handles/runtime.h"
#include "csrc/plan/plan.h"
#include "csrc/plan/plan_cache.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"
#include "tests/cpp/world.h"

namespace jaxmp {
namespace {

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

struct Completion {
  std::promise<std::string> message;
  hostmp::Stream stream;

  explicit Completion(hostmp::Rendezvous* rendezvous, int64_t run_id) {
    const auto done = [](void* context, const Status& status) {
      static_cast<Completion*>(context)->message.set_value(status.message());
    };
    stream = {rendezvous, run_id, 0, nullptr, done, this};
  }
};

StatusOr<std::shared_ptr<Plan>> MakePlan(const MpApi& api, const Problem& problem) {
  return Plan::Make(api, problem, GetCommunicator({problem.mesh_shape, problem.axes_row, problem.axes_col}));
}

// One product, all ranks on this thread; "" or the first error. With a C, that is D's memory.
std::string RunOnce(Plan& plan, tests::World& world) {
  hostmp::Rendezvous rendezvous;
  std::vector<std::unique_ptr<Completion>> completions;
  std::vector<Plan::ExecutionHandle> handles;
  for (int rank = 0; rank < plan.nranks(); ++rank) {
    const size_t r = static_cast<size_t>(rank);
    completions.push_back(std::make_unique<Completion>(&rendezvous, 0));
    Buffers buffers;
    buffers.a = world.a[r].data();
    buffers.b = world.b[r].data();
    buffers.c = plan.problem().has_c() ? world.d[r].data() : nullptr;
    buffers.d = world.d[r].data();
    const abi::cudaStream_t stream = hostmp::AsStream(&completions.back()->stream);
    StatusOr<Plan::ExecutionHandle> handle = plan.Take(rank, buffers, stream);
    if (!handle.ok()) return handle.status().message();
    handles.push_back(std::move(*handle));
    const Status status = plan.Run(rank, *handles.back(), buffers, stream);
    if (!status.ok()) return status.message();
  }
  std::string first;
  for (auto& completion : completions) {
    const std::string message = completion->message.get_future().get();
    if (first.empty()) first = message;
  }
  return first;
}

void EveryPatternIsRight() {
  for (int64_t nranks : {1, 2, 3}) {
    for (const Attributes& base :
         {tests::Local(7, 5, 9), tests::AllGather(nranks, 6, 12, 5), tests::ReduceScatter(nranks, 5, 6, 12),
          tests::AllReduce(nranks, 3, 5, 12), tests::Grid(2, 2, 4, 8, 6), tests::Grid(2, 3, 6, 12, 18),
          tests::Grid(4, 1, 8, 4, 12), tests::Grid(1, 3, 3, 6, 9)}) {
      for (const char* trans_a : {"N", "T"}) {
        for (const char* trans_b : {"N", "T"}) {
          Attributes attributes = base;
          attributes["trans_a"] = std::string(trans_a);
          attributes["trans_b"] = std::string(trans_b);
          const Problem problem = *MakeProblem(attributes);
          auto plan = MakePlan(host_api(), problem);
          CHECK_EQ(plan.status().message(), "");
          tests::World world(problem);
          CHECK_EQ(RunOnce(**plan, world), "");
          CHECK(world.IsRight());
        }
      }
    }
  }
}

// D = A B - 3 C where D is C's memory; an all-reduce, whose every rank holds the same C, adds it once.
void CIsUpdatedInPlace() {
  const auto c = [](const Problem& p) {
    return [n = p.n](int64_t i, int64_t j) { return static_cast<float>((i * 3 + j % n * 4) % 7 - 3); };
  };
  for (Attributes attributes :
       {tests::Local(7, 5, 9), tests::AllGather(3, 6, 12, 5), tests::ReduceScatter(3, 5, 6, 12),
        tests::AllReduce(3, 4, 5, 12), tests::Grid(2, 2, 4, 8, 6), tests::Grid(1, 3, 3, 6, 9)}) {
    attributes["dtype_c"] = std::string("f32");
    for (double beta : {-3.0, 0.0}) {
      attributes["beta"] = std::vector<double>{beta, 0};
      const Problem problem = *MakeProblem(attributes);
      auto plan = *MakePlan(host_api(), problem);
      tests::World world(problem);  // D holds NaN, which beta = 0 does not read
      for (int rank = 0; rank < problem.nranks() && beta != 0; ++rank) {
        world.d[static_cast<size_t>(rank)] = world.Part(world.layout.d, rank, c(problem));
      }
      CHECK_EQ(RunOnce(*plan, world), "");
      for (int rank = 0; rank < problem.nranks(); ++rank) {
        std::vector<float> expected = world.Expected(rank);
        const std::vector<float> before = world.Part(world.layout.d, rank, c(problem));
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += static_cast<float>(beta) * before[i];
        CHECK(world.d[static_cast<size_t>(rank)] == expected);
      }
    }
  }
}

void CyclicLayoutsAreRight() {
  static const MpApi strict = Strict();
  for (const auto& [nprow, npcol] : {std::pair<int64_t, int64_t>{1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 3}, {3, 2}}) {
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{4, 6, 8}, {13, 11, 17}, {1, 2, 3}, {24, 36, 48}}) {
      for (const bool a_is_n : {true, false}) {
        for (const bool b_is_n : {true, false}) {
          const Problem problem = *MakeProblem(tests::Cyclic(nprow, npcol, m, n, k, a_is_n, b_is_n));
          auto plan = MakePlan(strict, problem);
          CHECK_EQ(plan.status().message(), "");
          tests::World world(problem);
          CHECK_EQ(RunOnce(**plan, world), "");
          CHECK(world.IsRight());
        }
      }
    }
  }
}

// hostmp refuses what the header forbids, so a plan that runs has passed its communication options on as the header has
// them.
void CommunicationOptionsReachTheLibrary() {
  const auto with = [](Attributes attributes, const char* name, const Attribute& value) {
    attributes[name] = value;
    return attributes;
  };
  const auto run = [](const Attributes& attributes) -> std::string {
    const Problem problem = *MakeProblem(attributes);
    auto plan = MakePlan(host_api(), problem);
    if (!plan.ok()) return plan.status().message();
    tests::World world(problem);
    const std::string error = RunOnce(**plan, world);
    CHECK(!error.empty() || world.IsRight());
    return error;
  };
  const Attributes gather = tests::AllGather(2, 4, 6, 8), scatter = tests::ReduceScatter(2, 4, 6, 8);
  for (const char* algorithm : {"split_p2p", "no_overlap", "default"}) {
    CHECK_EQ(run(with(gather, "algorithm", std::string(algorithm))), "");
    CHECK_EQ(run(with(scatter, "algorithm", std::string(algorithm))), "");
  }
  CHECK_EQ(run(with(scatter, "algorithm", std::string("split_multicast"))), "");
  CHECK_CONTAINS(run(with(gather, "algorithm", std::string("split_multicast"))), "algorithm 2 (SPLIT_MULTICAST)");
  CHECK_CONTAINS(run(with(scatter, "algorithm", std::string("fused"))), "algorithm 6 (FUSED) all-reduces");
  CHECK_EQ(run(with(tests::AllReduce(2, 4, 6, 8), "algorithm", std::string("fused"))), "");
  CHECK_EQ(run(with(scatter, "communication_dtype", std::string("f32"))), "");
  CHECK_CONTAINS(run(with(gather, "communication_dtype", std::string("f32"))), "COMMUNICATION_TYPE f32 is of partial");
  CHECK_CONTAINS(run(with(scatter, "communication_dtype", std::string("bf16"))), "COMMUNICATION_TYPE bf16 must be no");
  CHECK_EQ(run(with(scatter, "comm_sm_count", int64_t{16})), "");
  for (const char* compute : {"32F", "32F_PEDANTIC", "32F_FAST_TF32", "32F_FAST_16BF", "32F_FAST_16F",
                              "32F_EMULATED_16BFX9"}) {  // small integers are exact in all of them
    CHECK_EQ(run(with(scatter, "compute", std::string(compute))), "");
  }
  for (const char* compute : {"64F", "64F_PEDANTIC", "64F_EMULATED_FIXEDPOINT"}) {
    CHECK_CONTAINS(run(with(scatter, "compute", std::string(compute))), "which takes CUBLAS_COMPUTE_32F");
  }
}

void AUsedPlanAnswersAsAFreshOne() {
  const Problem problem = *MakeProblem(tests::ReduceScatter(2, 17, 6, 10));
  auto used = *MakePlan(host_api(), problem);
  for (int salt = 1; salt < 4; ++salt) {
    tests::World other(problem, salt);
    CHECK_EQ(RunOnce(*used, other), "");
  }
  auto fresh = *MakePlan(host_api(), problem);
  tests::World first(problem), second(problem);
  CHECK_EQ(RunOnce(*used, first), "");
  CHECK_EQ(RunOnce(*fresh, second), "");
  CHECK(first.d == second.d);
  CHECK(first.IsRight());
}

void SlotsAreReusedAndGrowOnlyWithConcurrentCalls() {
  MpApi api = host_api();
  api.Create = CountingCreate;
  handles_made = 0;
  const Problem problem = *MakeProblem(tests::AllReduce(2, 4, 4, 4));
  auto plan = *MakePlan(api, problem);
  CHECK_EQ(handles_made.load(), 2);  // one a rank, made for the workspace query
  for (int run = 0; run < 5; ++run) {
    tests::World world(problem, run);
    CHECK_EQ(RunOnce(*plan, world), "");
    CHECK(world.IsRight());
  }
  CHECK_EQ(handles_made.load(), 2);
  {
    const Plan::ExecutionHandle held = *plan->Take(0, {}, nullptr), another = *plan->Take(0, {}, nullptr);
    CHECK_EQ(handles_made.load(), 3);
  }
  const Plan::ExecutionHandle again = *plan->Take(0, {}, nullptr), more = *plan->Take(0, {}, nullptr);
  CHECK_EQ(handles_made.load(), 3);
}

void AnOrderThatTheLibraryLacksIsRefused() {
  static const MpApi strict = Strict();
  Attributes attributes = tests::Local(4, 4, 4);
  attributes["determinism"] = std::string("batch");
  CHECK_EQ(MakePlan(strict, *MakeProblem(attributes)).status().message(),
           "jaxmp: strict cannot keep the order of sums, got determinism batch");
}

void TheLibrarysReasonReachesTheCaller() {
  Attributes attributes = tests::Local(4, 4, 4);
  attributes["epilog"] = int64_t{3 << 10};
  const Status status = MakePlan(host_api(), *MakeProblem(attributes)).status();
  CHECK(!status.ok());
  CHECK(status.message().find("jaxmp: ") == 0);
}

void TheCacheTellsLibrariesApart() {
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

int main() {
  CHECK_EQ(jaxmp::hostmp::LoadBlas(jaxmp::check::environment("JAXMP_BLAS")).message(), "");
  jaxmp::EveryPatternIsRight();
  jaxmp::CIsUpdatedInPlace();
  jaxmp::CyclicLayoutsAreRight();
  jaxmp::CommunicationOptionsReachTheLibrary();
  jaxmp::AUsedPlanAnswersAsAFreshOne();
  jaxmp::SlotsAreReusedAndGrowOnlyWithConcurrentCalls();
  jaxmp::AnOrderThatTheLibraryLacksIsRefused();
  jaxmp::TheLibrarysReasonReachesTheCaller();
  jaxmp::TheCacheTellsLibrariesApart();
  return jaxmp::check::summary("plan_run");
}
