// The custom call as XLA drives it, without XLA: ranks on threads, overlapping runs, errors that must reach every rank.

#include "csrc/ffi/host_matmul.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_xla.h"
#include "tests/cpp/problems.h"
#include "tests/cpp/world.h"

namespace jaxmp {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using fake_xla::Buffer;
using fake_xla::Execution;
using fake_xla::F32;
using tests::With;

Buffer Position(int32_t& position) { return {XLA_FFI_DataType_S32, {}, &position}; }

// Returns the position of a rank in the mesh.
int32_t PositionOf(const Problem& problem, int32_t rank) {
  const auto communicator = GetCommunicator({problem.mesh_shape, problem.axes_row, problem.axes_col});
  int32_t position = 0;
  while (communicator->Locate(position)->rank != rank) ++position;
  return position;
}

// One rank of a world in one run.
std::unique_ptr<Execution> Begin(Site& site, tests::World& world, int64_t run_id, int32_t rank) {
  const size_t r = static_cast<size_t>(rank);
  std::vector<Buffer> args = {F32(world.a[r]), F32(world.b[r])};
  if (world.problem.has_c()) args.push_back(F32(world.d[r]));
  int32_t position = PositionOf(world.problem, rank);
  if (world.problem.nranks() > 1) args.push_back(Position(position));
  return std::make_unique<Execution>(site, run_id, std::move(args), std::vector<Buffer>{F32(world.d[r])});
}

// Runs every rank on a thread of its own, as devices do. Returns the errors by rank.
std::vector<std::string> RunAll(Site& site, tests::World& world, int64_t run_id) {
  std::vector<std::string> errors(static_cast<size_t>(world.problem.nranks()));
  std::vector<std::thread> ranks;
  for (int32_t rank = 0; rank < static_cast<int32_t>(errors.size()); ++rank) {
    ranks.emplace_back([&, rank] { errors[static_cast<size_t>(rank)] = Begin(site, world, run_id, rank)->Wait(); });
  }
  for (std::thread& rank : ranks) rank.join();
  return errors;
}

// Returns the error of a call, or "" if D is right. Operands differ each time: a used plan answers like a fresh one.
std::string Run(const Attributes& attributes) {
  fake_xla::Instance instance = fake_xla::Instantiate(attributes);
  if (!instance.site) return instance.error;
  for (int64_t run_id = 0; run_id < 3; ++run_id) {
    tests::World world(*MakeProblem(attributes), int(run_id));
    for (const std::string& error : RunAll(*instance.site, world, run_id)) {
      if (!error.empty()) return error;
    }
    if (!world.IsRight()) return "D is wrong: " + ToString(world.problem);
  }
  return "";
}

TEST(RunsEveryPattern) {
  CHECK_EQ(Run(tests::Local(300, 200, 100)), "");
  for (int64_t nranks : {1, 2, 3}) {
    for (const Attributes& base :
         {tests::Local(7, 5, 9), tests::AllGather(nranks, 6, 12, 5), tests::ReduceScatter(nranks, 5, 6, 12),
          tests::AllReduce(nranks, 3, 5, 12), tests::Grid(2, 2, 4, 8, 6), tests::Grid(nranks, 3, 6, 12, 18),
          tests::Grid(4, 1, 8, 4, 12)}) {
      for (const char* trans_a : {"N", "T"}) {
        for (const char* trans_b : {"N", "T"}) {
          const Attributes call = With(base, {{"trans_a", std::string(trans_a)}, {"trans_b", std::string(trans_b)}});
          CHECK_EQ(Run(call), "");
          for (double beta : {-3.0, 0.0}) {  // C is in D's memory
            CHECK_EQ(Run(With(call, {{"dtype_c", std::string("f32")}, {"beta", std::vector<double>{beta, 0}}})), "");
          }
        }
      }
    }
  }
}

TEST(RunsEveryCyclicLayout) {
  for (const auto& [nprow, npcol] : {std::pair<int64_t, int64_t>{1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 3}, {3, 2}}) {
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{4, 6, 8}, {13, 11, 17}, {1, 2, 3}, {24, 36, 48}}) {
      for (const bool a_is_n : {true, false}) {
        for (const bool b_is_n : {true, false}) CHECK_EQ(Run(tests::Cyclic(nprow, npcol, m, n, k, a_is_n, b_is_n)), "");
      }
    }
  }
}

// hostmp refuses what the header forbids, so a call that runs has passed its communication options on as the header has
// them.
TEST(CommunicationOptionsReachTheLibrary) {
  const auto run = [](const Attributes& attributes, const char* name, const char* value) {
    return Run(With(attributes, {{name, std::string(value)}}));
  };
  const Attributes gather = tests::AllGather(2, 4, 6, 8), scatter = tests::ReduceScatter(2, 4, 6, 8);
  for (const char* algorithm : {"split_p2p", "no_overlap", "default"}) {
    CHECK_EQ(run(gather, "algorithm", algorithm), "");
    CHECK_EQ(run(scatter, "algorithm", algorithm), "");
  }
  CHECK_EQ(run(scatter, "algorithm", "split_multicast"), "");
  CHECK_CONTAINS(run(gather, "algorithm", "split_multicast"), "algorithm 2 (SPLIT_MULTICAST)");
  CHECK_CONTAINS(run(scatter, "algorithm", "fused"), "algorithm 6 (FUSED) all-reduces");
  CHECK_EQ(run(tests::AllReduce(2, 4, 6, 8), "algorithm", "fused"), "");
  CHECK_EQ(run(scatter, "communication_dtype", "f32"), "");
  CHECK_CONTAINS(run(gather, "communication_dtype", "f32"), "COMMUNICATION_TYPE f32 is of partial");
  CHECK_CONTAINS(run(scatter, "communication_dtype", "bf16"), "COMMUNICATION_TYPE bf16 must be no");
  CHECK_EQ(Run(With(scatter, {{"comm_sm_count", int64_t{16}}})), "");
  for (const char* compute : {"32F", "32F_PEDANTIC", "32F_FAST_TF32", "32F_FAST_16BF", "32F_FAST_16F",
                              "32F_EMULATED_16BFX9"}) {  // small integers are exact in all of them
    CHECK_EQ(run(scatter, "compute", compute), "");
  }
  for (const char* compute : {"64F", "64F_PEDANTIC", "64F_EMULATED_FIXEDPOINT"}) {
    CHECK_CONTAINS(run(scatter, "compute", compute), "which takes CUBLAS_COMPUTE_32F");
  }
}

// Also if helpers are slow with the last pieces.
TEST(OneRankNeedsNoFuture) {
  for (const int64_t extent : {8, 768}) {
    const Attributes attributes = tests::Local(extent, extent, extent);
    fake_xla::Instance instance = fake_xla::Instantiate(attributes);
    tests::World world(*MakeProblem(attributes));
    for (int64_t run_id = 0; run_id < 20; ++run_id) {
      const auto execution = Begin(*instance.site, world, run_id, 0);
      CHECK(!execution->is_asynchronous());
      CHECK_EQ(execution->Wait(), "");
    }
  }
}

TEST(OverlappingRunsOfOneSiteDoNotMix) {
  const Attributes attributes = tests::ReduceScatter(2, 9, 4, 6);
  fake_xla::Instance instance = fake_xla::Instantiate(attributes);
  std::atomic<int> failures{0};
  std::vector<std::thread> runs;
  for (int64_t run_id = 0; run_id < 8; ++run_id) {
    runs.emplace_back([&, run_id] {
      for (int iteration = 0; iteration < 20; ++iteration) {  // a loop inside one run repeats its run id
        tests::World world(*MakeProblem(attributes), int(run_id));
        for (const std::string& error : RunAll(*instance.site, world, run_id)) failures += !error.empty();
        failures += !world.IsRight();
      }
    });
  }
  for (std::thread& run : runs) run.join();
  CHECK_EQ(failures.load(), 0);
}

TEST(EqualCallSitesShareAPlanButNotARendezvous) {
  const Attributes attributes = tests::AllReduce(2, 4, 4, 6);
  fake_xla::Instance one = fake_xla::Instantiate(attributes), two = fake_xla::Instantiate(attributes);
  CHECK(one.site->plan == two.site->plan);
  tests::World world(*MakeProblem(attributes)), other(*MakeProblem(attributes), 1);
  // Rank 0 comes to the first site first, rank 1 to the second one first: the runs of two ranks may be in any order.
  const auto a0 = Begin(*one.site, world, 0, 0), b1 = Begin(*two.site, other, 0, 1);
  const auto b0 = Begin(*two.site, other, 0, 0), a1 = Begin(*one.site, world, 0, 1);
  for (const auto& execution : {a0.get(), a1.get(), b0.get(), b1.get()}) CHECK_EQ(execution->Wait(), "");
  CHECK(world.IsRight());
  CHECK(other.IsRight());
}

TEST(AnErrorOnOneRankReachesAll) {
  const Attributes attributes = tests::AllReduce(3, 4, 4, 6);
  fake_xla::Instance instance = fake_xla::Instantiate(attributes);
  tests::World world(*MakeProblem(attributes));
  int32_t positions[] = {0, 1, 2};
  for (const size_t failing : {0, 1, 2}) {
    std::vector<std::unique_ptr<Execution>> executions;
    for (size_t r : {0, 1, 2}) {
      Buffer a = F32(world.a[r]);
      if (r == failing) a.data = nullptr;  // the library refuses it, on this rank alone
      executions.push_back(std::make_unique<Execution>(*instance.site, 0,
                                                       std::vector<Buffer>{a, F32(world.b[r]), Position(positions[r])},
                                                       std::vector<Buffer>{F32(world.d[r])}));
    }
    for (const auto& execution : executions) CHECK_CONTAINS(execution->Wait(), "jaxmp: ");
    for (const std::string& error : RunAll(*instance.site, world, 1)) CHECK_EQ(error, "");  // the site has recovered
    CHECK(world.IsRight());
  }
}

TEST(BuffersAreChecked) {
  const Attributes attributes = tests::AllReduce(2, 4, 6, 8);
  fake_xla::Instance instance = fake_xla::Instantiate(attributes);
  tests::World world(*MakeProblem(attributes));
  int32_t position = 0;
  const std::vector<Buffer> good = {F32(world.a[0]), F32(world.b[0]), Position(position)};
  const std::vector<Buffer> results = {F32(world.d[0])};
  const auto error = [&](std::vector<Buffer> args, std::vector<Buffer> rets) {
    return Execution(*instance.site, 0, std::move(args), std::move(rets)).Wait();
  };
  std::vector<Buffer> args = good;
  args[1].shape = {3, 6};
  CHECK_EQ(error(args, results), "jaxmp: b must hold 24 elements of f32 on each device, got local shape (3, 6)");
  args = good;
  args[0].dtype = XLA_FFI_DataType_F64;
  CHECK_CONTAINS(error(args, results),
                 "a must hold 16 elements of f32 on each device, got local shape (16) of another "
                 "dtype");
  args = good;
  args.pop_back();
  CHECK_EQ(error(args, results), "jaxmp: argument position is missing");
  args = good;
  args.push_back(good[0]);
  CHECK_EQ(error(args, results), "jaxmp: expected 3 arguments and 1 results, got 4 and 1");
  CHECK_EQ(error(good, {}), "jaxmp: result d is missing");
  position = 2;
  CHECK_EQ(error(good, results), "jaxmp: the mesh has no position 2");
}

// D = A B times gelu'(40) = 1, and its rows' sums: an aux that is read, and two results.
TEST(AuxInputsAndBiasGradientsHaveTheirPlaces) {
  Attributes attributes = tests::Local(8, 2, 3);
  attributes["epilog"] = int64_t{208};  // DGELU_BGRAD
  attributes["dtype_bias"] = attributes["dtype_aux"] = std::string("f32");
  fake_xla::Instance instance = fake_xla::Instantiate(attributes);
  std::vector<float> a(24, 2), b(6, 1), aux(16, 40), d(16), sums(8);
  b[0] = 5;  // the first column of D is 2 * (5 + 1 + 1)
  const auto error = [&](std::vector<Buffer> args, std::vector<Buffer> rets) {
    return Execution(*instance.site, 0, std::move(args), std::move(rets)).Wait();
  };
  CHECK_EQ(error({F32(a), F32(b), F32(aux)}, {F32(d), F32(sums)}), "");
  CHECK(d == std::vector<float>({14, 14, 14, 14, 14, 14, 14, 14, 6, 6, 6, 6, 6, 6, 6, 6}));
  CHECK(sums == std::vector<float>(8, 20));
  CHECK_EQ(error({F32(a), F32(b)}, {F32(d), F32(sums)}), "jaxmp: argument aux is missing");
  CHECK_EQ(error({F32(a), F32(b), F32(aux)}, {F32(d)}), "jaxmp: result gradient is missing");
  CHECK_EQ(error({F32(a), F32(b), F32(aux)}, {F32(d), F32(b)}),
           "jaxmp: gradient must hold 8 elements of f32 on each device, got local shape (6)");
}

TEST(EmptyProductsRunNothing) {
  fake_xla::Instance instance = fake_xla::Instantiate(tests::AllGather(2, 0, 4, 4));
  tests::World world(*MakeProblem(tests::AllGather(2, 0, 4, 4)));
  CHECK_EQ(Begin(*instance.site, world, 0, 1)->Wait(), "");  // no peer needed
}

TEST(ASiteThatGoesAwayFreesItsWaitingRanks) {
  fake_xla::Instance instance = fake_xla::Instantiate(tests::AllReduce(2, 4, 4, 4));
  tests::World world(*MakeProblem(tests::AllReduce(2, 4, 4, 4)));
  const auto execution = Begin(*instance.site, world, 0, 0);
  instance.site.reset();
  CHECK(!execution->Wait().empty());
}

}  // namespace
}  // namespace jaxmp
