// Checks that handler_execute, which runs every distribution, cannot make. (hostmp refuses blocks that do not match.)

#include "csrc/plan/distribution.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

std::string Refusal(const Attributes& attributes) {
  return MakeDistribution(*MakeProblem(attributes)).status().message();
}

TEST(EpilogsNeedTheirBuffers) {
  const struct {
    int64_t m, epilog;
    const char *bias, *aux, *refusal;
  } cases[] = {{34, 164, "f32", "u8", "epilog 164 needs an aux, got dtype_aux u8"},
               {34, 164, "none", "f32", "epilog 164 needs bias, but dtype_bias is none"},
               {34, 256, "none", "none", "epilog 256 needs bias, but dtype_bias is none"},
               {34, 152, "f32", "none", "epilog 152 needs dtype_aux u8, got dtype_aux none"},
               {34, 1, "none", "f32", "ALLREDUCE bit"},
               {0, 152, "f32", "u8", "epilog 152 sums to a bias gradient, but D has no elements"}};
  for (const auto& [m, epilog, bias, aux, refusal] : cases) {
    CHECK_CONTAINS(
        Refusal(tests::With(tests::AllGather(2, m, 6, 4),
                            {{"epilog", epilog}, {"dtype_bias", std::string(bias)}, {"dtype_aux", std::string(aux)}})),
        refusal);
  }
  CHECK_EQ(Refusal(tests::With(tests::Cyclic(2, 2, 4, 4, 4), {{"epilog", int64_t{2}}})),
           "jaxmp: block-cyclic layouts take no epilog, got epilog 2");
}

TEST(ACyclicResultBeginsAtItsOwnProcess) {
  const Distribution layout = *MakeDistribution(*MakeProblem(tests::Cyclic(2, 3, 10, 19, 13)));
  CHECK_EQ(layout.d.row_source, 1);
  CHECK_EQ(layout.d.col_source, 1);
}

TEST(ExtentsThatDoNotDivideAreNamed) {
  CHECK_EQ(Refusal(tests::AllGather(4, 6, 8, 3)),
           "jaxmp: pattern all_gather needs m to be a multiple of 4, got m=6; pad the operands or choose another mesh");
  CHECK_CONTAINS(Refusal(tests::AllGather(4, 8, 6, 3)), "needs n to be a multiple of 4, got n=6");
  CHECK_CONTAINS(Refusal(tests::ReduceScatter(4, 1, 4, 6)), "got k=6");
  CHECK_CONTAINS(Refusal(tests::AllReduce(3, 1, 1, 4)), "multiple of 3, got k=4");
  CHECK_CONTAINS(Refusal(tests::Grid(2, 3, 2, 3, 4)), "multiple of 3, got k=4");
  CHECK_EQ(Refusal(tests::AllGather(4, 0, 0, 0)), "");
}

}  // namespace
}  // namespace jaxmp
