// Ranks that pass different arguments would make the real library hang or answer wrongly: hostmp tells all of them
// which argument differs, and the value of each rank.

#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

// Rank 1 passes something else; both ranks get the name of the argument, and both values.
void disagree(Pattern pattern, const std::function<void(Call&)>& change, const std::string& what) {
  World world(product(pattern, 2, 8, 8, 8));
  change(world.calls[1]);
  world.run(nullptr);
  CHECK_EQ(world.errors[0], world.errors[1]);
  CHECK_CONTAINS(world.errors[0], what);
}

std::function<void(Call&)> setting(int attribute, int value) {
  return [=](Call& call) {
    const auto number = static_cast<cublasMpMatmulDescriptorAttribute_t>(attribute);
    check_ok(api.MatmulDescriptorSetAttribute(call.matmul, number, &value, sizeof(value)));
  };
}

TEST(test_agreement) {
  static const float alpha = 3;
  const World other(product(Pattern::kAllGather, 2, 8, 8, 8));
  disagree(Pattern::kAllGather, [](Call& call) { call.k = 4; }, "ranks disagree on k: rank 0 has 8, rank 1 has 4");
  disagree(Pattern::kAllGather, setting(4, 8), "disagree on COMMUNICATION_SM_COUNT: rank 0 has 0, rank 1 has 8");
  disagree(Pattern::kReduceScatter, setting(27, CUDA_R_32F),
           "disagree on COMMUNICATION_TYPE: rank 0 has -1, rank 1 has 0");
  disagree(
      Pattern::kAllGather, [](Call& call) { call.alpha = &alpha; }, "disagree on alpha: rank 0 has 1, rank 1 has 3");
  disagree(Pattern::kAllGather, setting(5, CUBLASMP_MATMUL_EPILOGUE_RELU),
           "disagree on EPILOGUE: rank 0 has 0, rank 1 has 2");
  const auto elsewhere = [&other](Call& call) {
    const Call& there = other.calls[1];
    call.desc_a = there.desc_a, call.desc_b = there.desc_b, call.desc_d = there.desc_d;
  };
  disagree(Pattern::kAllGather, elsewhere, "different communicators");
}

}  // namespace
}  // namespace jaxmp::test
