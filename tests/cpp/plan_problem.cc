// The cache key: what decodes, what is refused, and when two problems are the same.

#include "csrc/plan/matmul_problem.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using tests::With;
using S = std::string;
using I = int64_t;
using L = std::vector<int64_t>;

constexpr I kLargest = I{1} << 40;

std::string Refusal(const Attributes& attributes) { return MakeProblem(attributes).status().message(); }

TEST(RefusesWhatIsNoProblem) {
  const Attributes product = tests::AllReduce(4, 6, 8, 10), cyclic = tests::Cyclic(2, 3, 6, 8, 10);
  const Attributes square = With(product, {{"mesh_shape", L{2, 2}}, {"axes_row", L{1}}});
  const Attributes one_axis = With(cyclic, {{"pattern", S("all_gather")}, {"axes_row", L{0, 1}}, {"axes_col", L{}}});
  const L ones = {1, 1, 0, 0};
  Attributes without_m = product;
  without_m.erase("m");
  const std::pair<Attributes, const char*> cases[] = {
      {With(product, {{"trans_a", S("X")}}), "jaxmp: attribute trans_a must be one of N, T, C; got X"},
      {With(product, {{"m", S("6")}}), "attribute m must be an int64"},
      {With(product, {{"m", I{-1}}}), "jaxmp: attribute m must not be negative, got -1"},
      {without_m, "attribute m must be present"},
      {With(product, {{"colour", I{1}}}), "expected 35 attributes, got 36"},
      // axes that the mesh lacks
      {With(product, {{"axes_row", L{1}}}), "distinct indices of the 1 axes of mesh_shape; got 1"},
      {With(square, {{"axes_row", L{1, 1}}}), "distinct indices"},
      {With(square, {{"axes_col", L{0}}}), "axes_col must be empty"},
      {With(square, {{"axes_col", L{0}}, {"pattern", S("local")}}), "pattern local takes no axes_row"},
      // layouts that the grid lacks
      {With(cyclic, {{"layout_a", L{2, 4, 1}}}), "attribute layout_a must be (mb, nb, rsrc, csrc)"},
      {With(cyclic, {{"layout_b", L{}}}), "attribute layout_b must be (mb, nb, rsrc, csrc) in each of layout_a"},
      {With(cyclic, {{"layout_d", L{}}}), "layout_a must be (mb, nb, rsrc, csrc) in each"},
      {With(cyclic, {{"layout_d", L{2, 0, 0, 0}}}),
       "blocks of 1 to 2^40 and a process of the 2x3 grid; got blocks 2x0"},
      {With(cyclic, {{"layout_b", L{4, 3, 0, 3}}}), "got blocks 4x3 from process (0, 3)"},
      {With(cyclic, {{"layout_b", L{4, 3, -1, 0}}}), "from process (-1, 0)"},
      {With(one_axis, {{"layout_a", ones}, {"layout_b", ones}, {"layout_d", ones}}),
       "block-cyclic layouts belong to pattern grid"},
      // numbers beyond any machine, refused before the first arithmetic, which would overflow
      {With(product, {{"m", kLargest + 1}}), "attribute m must be at most 1099511627776, got 1099511627777"},
      {With(product, {{"k", I{1} << 62}}), "attribute k must be at most"},
      {With(product, {{"epilog", (I{1} << 32) + 4}}), "attribute epilog must be at most 2147483647"},
      {With(product, {{"comm_sm_count", I{1} << 31}}), "must be at most 2147483647, got 2147483648"},
      {With(product, {{"amax_d", I{2}}}), "attribute amax_d must be at most 1, got 2"}};
  for (const auto& [attributes, says] : cases) CHECK_CONTAINS(Refusal(attributes), says);
  for (I block : {kLargest + 1, I{1} << 62, INT64_MAX}) {
    CHECK_CONTAINS(Refusal(With(cyclic, {{"layout_a", L{block, 4, 0, 0}}})), "must hold blocks of 1 to 2^40");
    CHECK_CONTAINS(Refusal(With(cyclic, {{"layout_d", L{2, block, 0, 0}}})), "must hold blocks of 1 to 2^40");
  }
  const Attributes integers = With(product, {{"compute", S("32I")}, {"dtype_d", S("s32")}});
  for (double alpha : {0.5, 3e9, -1e300, std::nan("")}) {
    CHECK_CONTAINS(Refusal(With(integers, {{"alpha", std::vector<double>{alpha, 0}}})),
                   "alpha must be an integer of 32 bits");
  }
  for (const Attributes& good :
       {cyclic, integers, With(product, {{"m", kLargest}}), With(cyclic, {{"layout_a", L{kLargest, 4, 0, 0}}})}) {
    CHECK_EQ(Refusal(good), "");
  }
}

TEST(ComparesEveryFieldByItsBits) {
  const Attributes base = tests::AllReduce(4, 6, 8, 10);
  const Problem problem = *MakeProblem(base);
  CHECK(problem == *MakeProblem(base));
  CHECK_EQ(ProblemHash()(problem), ProblemHash()(*MakeProblem(base)));
  const Attributes changes = {{"k", int64_t{12}},
                              {"trans_b", std::string("T")},
                              {"dtype_bias", std::string("f32")},
                              {"compute", std::string("64F")},
                              {"beta", std::vector<double>{-0.0, 0}},
                              {"epilog", int64_t{4}},
                              {"mesh_shape", std::vector<int64_t>{4, 1}},
                              {"determinism", std::string("none")},
                              {"communication_dtype", std::string("f32")},
                              {"algorithm", std::string("fused")},
                              {"comm_sm_count", int64_t{8}}};
  for (const auto& [name, value] : changes) {
    CHECK(*MakeProblem(With(base, {{name, value}})) != problem);
  }
  const Attributes cyclic = tests::Cyclic(2, 2, 6, 8, 10);
  CHECK(*MakeProblem(cyclic) != *MakeProblem(With(cyclic, {{"layout_d", L{2, 3, 0, 1}}})));
  CHECK(*MakeProblem(cyclic) != *MakeProblem(tests::Grid(2, 2, 6, 8, 10)));
}

}  // namespace
}  // namespace jaxmp
