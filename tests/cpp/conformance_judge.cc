// Tests the judge of the conformance suite: without this, a suite that finds nothing could be one that looks at
// nothing. Right results pass; each kind of result, wrong by one element, and each kind of stray write, is found.

#include "tests/conformance/run.h"
#include "tests/cpp/check.h"

namespace jaxmp::conformance {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

struct World {
  World() : backend(make_host_backend(1)), rank(*backend->make_rank(0)) {
    runner = std::make_unique<Runner>(*backend, *rank, 0, 1);
    CHECK_EQ(runner->start().message(), "");
  }
  Outcome run(const Case& c, const Expected& expected) { return runner->run(c, Operands(c), expected, ++index); }

  std::unique_ptr<Backend> backend;
  std::unique_ptr<Rank> rank;
  std::unique_ptr<Runner> runner;
  int64_t index = 0;
};

bool is_right(const Outcome& outcome) {
  for (const auto& [name, verdict] : outcome.results) {
    if (verdict.worst > 1) return false;
  }
  return outcome.status == CUBLASMP_STATUS_SUCCESS && outcome.is_memory_intact && !outcome.results.empty();
}

Case with_epilog(int epilog, cudaDataType_t type = CUDA_R_32F) {
  Case c = make_case("judge", Pattern::kLocal, 1, type, type);
  c.epilog = epilog;
  if (epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB) c.trans_b = CUBLAS_OP_T;
  return c;
}

Case narrow(cudaDataType_t out) {
  Case c = make_case("judge", Pattern::kLocal, 1, CUDA_R_8F_E4M3, out);
  c.m = c.n = c.k = 128;
  c.trans_a = CUBLAS_OP_T;
  c.c_type = c.bias_type = CUDA_R_16F;
  return c;
}

// Checks that the result of this name is right, and no longer when `spoil` changes what is expected of it.
void check_found(World* world, const Case& c, const char* result, const std::function<void(Expected*)>& spoil) {
  Expected expected(c, Operands(c));
  const Outcome before = world->run(c, expected);
  check::report(is_right(before), __FILE__, __LINE__, c.name() + ": " + before.error);
  CHECK_EQ(before.results.count(result), size_t{1});
  spoil(&expected);
  const Outcome after = world->run(c, expected);
  check::report(after.results.at(result).worst > 1, __FILE__, __LINE__, c.name() + ": " + result + " is not judged");
  for (const auto& [name, verdict] : after.results) {
    if (name != result) CHECK(verdict.worst <= 1);
  }
}

TEST(test_results) {
  World world;
  const auto one_of_d = [](Expected* x) { x->d.at(3, 2) += 1; };
  const auto one_of_z = [](Expected* x) { x->z.at(3, 2) = -x->z.at(3, 2) + 0.5; };
  const auto one_sum = [](Expected* x) { x->gradient[5] += 1; };
  check_found(&world, with_epilog(0), "d", one_of_d);
  check_found(&world, with_epilog(0, CUDA_R_16BF), "d", one_of_d);
  check_found(&world, with_epilog(CUBLASMP_MATMUL_EPILOGUE_GELU), "d", one_of_d);
  check_found(&world, with_epilog(CUBLASMP_MATMUL_EPILOGUE_RELU_AUX), "aux", one_of_z);
  check_found(&world, with_epilog(CUBLASMP_MATMUL_EPILOGUE_GELU_AUX), "aux", one_of_z);
  check_found(&world, with_epilog(CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD), "gradient", one_sum);
  check_found(&world, with_epilog(CUBLASMP_MATMUL_EPILOGUE_BGRADA), "gradient", one_sum);
  check_found(&world, with_epilog(CUBLASMP_MATMUL_EPILOGUE_BGRADB), "gradient", one_sum);
  Case amax = narrow(CUDA_R_8F_E4M3);
  amax.has_amax = true;
  check_found(&world, amax, "amax", [](Expected* x) {
    x->d.at(0, 0) = 512;  // not visible in D, which ends at 448
    x->magnitude.at(0, 0) = 1e9;
  });
  Case blocks = narrow(CUDA_R_8F_E4M3);
  blocks.scale_a = blocks.scale_b = blocks.d_out_scale = CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  check_found(&world, blocks, "d", [](Expected* x) {
    for (Number& value : x->d.values) value += value == 0.0 ? 1.0 : value;
  });
}

// A small error in a result that has one right answer is inexact, and still within its bound.
TEST(test_rounding) {
  World world;
  const Case c = with_epilog(0);
  Expected expected(c, Operands(c));
  expected.d.at(0, 0) += 1e-5;
  const Verdict verdict = world.run(c, expected).results.at("d");
  CHECK(!verdict.is_exact);
  CHECK(verdict.worst > 0 && verdict.worst < 1);
}

TEST(test_verdict) {
  Verdict verdict;
  verdict.add(1, 1, 1e-37);
  CHECK(verdict.is_exact);
  verdict.add(1.5, 1, 2);
  CHECK_EQ(verdict.worst, 0.25);
  verdict.add(NAN, 1, 1e9);
  CHECK(verdict.worst > 1);
  verdict.add(1, 1, 1);
  CHECK(verdict.worst > 1);
}

TEST(test_memory) {
  World world;
  Buffer buffer(world.rank.get(), 64);
  const auto changes = [&buffer](int64_t at) {
    CHECK(buffer.write().ok());
    buffer.get()[at] ^= 1;
    CHECK(buffer.read().ok());
    CHECK(!buffer.is_untouched());
    return !buffer.margins_are_intact();
  };
  CHECK(changes(-1));
  CHECK(changes(64));
  CHECK(!changes(0));
  CHECK(!changes(63));
}

// Each name once, so that two libraries' lines can be matched.
TEST(test_names) {
  for (int nranks : {1, 2, 4}) {
    std::map<std::string, int> seen;
    for (const Case& c : all_cases(nranks)) ++seen[c.name()];
    for (const auto& [name, count] : seen) check::report(count == 1, __FILE__, __LINE__, "twice: " + name);
    CHECK(seen.size() > 1000);
  }
}

}  // namespace
}  // namespace jaxmp::conformance
