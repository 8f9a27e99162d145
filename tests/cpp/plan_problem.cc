// The cache key: what decodes, what is refused, and when two problems are the same.
#include <cmath>

#include "csrc/plan/matmul_problem.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

std::string Refusal(const Attributes& attributes) { return MakeProblem(attributes).status().message(); }

TEST(DecodesEveryAttribute) {
  Attributes attributes = tests::AllReduce(4, 6, 8, 10);
  attributes["alpha"] = std::vector<double>{2, -1};
  const StatusOr<Problem> problem = MakeProblem(attributes);
  CHECK(problem.ok());
  CHECK(problem->pattern == Pattern::kAllReduce);
  CHECK_EQ(problem->m, 6);
  CHECK_EQ(problem->n, 8);
  CHECK_EQ(problem->k, 10);
  CHECK(problem->alpha == std::complex<double>(2, -1));
  CHECK_EQ(problem->nranks(), 4);
  CHECK(ToString(*problem).find("pattern=all_reduce m=6 n=8 k=10 trans_a=N") == 0);
  CHECK_CONTAINS(ToString(*problem), "alpha=2-1i");
}

TEST(RefusesWhatItDoesNotKnow) {
  Attributes attributes = tests::AllReduce(4, 6, 8, 10);
  attributes["trans_a"] = std::string("X");
  CHECK_EQ(Refusal(attributes), "jaxmp: attribute trans_a must be one of N, T, C; got X");
  attributes = tests::AllReduce(4, 6, 8, 10);
  attributes["m"] = std::string("6");
  CHECK_CONTAINS(Refusal(attributes), "attribute m must be an int64");
  attributes["m"] = int64_t{-1};
  CHECK_EQ(Refusal(attributes), "jaxmp: attribute m must not be negative, got -1");
  attributes.erase("m");
  CHECK_CONTAINS(Refusal(attributes), "attribute m must be present");
  attributes = tests::AllReduce(4, 6, 8, 10);
  attributes["colour"] = int64_t{1};
  CHECK_CONTAINS(Refusal(attributes), "expected 35 attributes, got 36");
}

TEST(RefusesAxesThatTheMeshLacks) {
  Attributes attributes = tests::AllReduce(4, 6, 8, 10);
  attributes["axes_row"] = std::vector<int64_t>{1};
  CHECK_CONTAINS(Refusal(attributes), "distinct indices of the 1 axes of mesh_shape; got 1");
  attributes["mesh_shape"] = std::vector<int64_t>{2, 2};
  attributes["axes_row"] = std::vector<int64_t>{1, 1};
  CHECK_CONTAINS(Refusal(attributes), "distinct indices");
  attributes["axes_row"] = std::vector<int64_t>{1};
  attributes["axes_col"] = std::vector<int64_t>{0};
  CHECK_CONTAINS(Refusal(attributes), "axes_col must be empty");
  attributes["pattern"] = std::string("local");
  CHECK_CONTAINS(Refusal(attributes), "pattern local takes no axes_row");
}

TEST(RefusesLayoutsThatTheGridLacks) {
  const Attributes base = tests::Cyclic(2, 3, 6, 8, 10);
  CHECK_EQ(Refusal(base), "");
  const auto with = [&base](const char* name, std::vector<int64_t> layout) {
    Attributes attributes = base;
    attributes[name] = std::move(layout);
    return Refusal(attributes);
  };
  CHECK_CONTAINS(with("layout_a", {2, 4, 1}), "attribute layout_a must be (mb, nb, rsrc, csrc)");
  CHECK_CONTAINS(with("layout_b", {}), "attribute layout_b must be (mb, nb, rsrc, csrc) in each of layout_a");
  CHECK_CONTAINS(with("layout_d", {}), "layout_a must be (mb, nb, rsrc, csrc) in each");
  CHECK_CONTAINS(with("layout_d", {2, 0, 0, 0}), "blocks of 1 to 2^40 and a process of the 2x3 grid; got blocks 2x0");
  CHECK_CONTAINS(with("layout_b", {4, 3, 0, 3}), "got blocks 4x3 from process (0, 3)");
  CHECK_CONTAINS(with("layout_b", {4, 3, -1, 0}), "from process (-1, 0)");
  Attributes attributes = base;
  attributes["pattern"] = std::string("all_gather");
  attributes["axes_row"] = std::vector<int64_t>{0, 1};
  attributes["axes_col"] = std::vector<int64_t>{};
  attributes["layout_a"] = attributes["layout_b"] = attributes["layout_d"] = std::vector<int64_t>{1, 1, 0, 0};
  CHECK_CONTAINS(Refusal(attributes), "block-cyclic layouts belong to pattern grid");
}

// Ahead of the first arithmetic, in which they would overflow.
TEST(RefusesNumbersBeyondAnyMachine) {
  const auto with = [](const Attributes& base, const char* name, const Attribute& value) {
    Attributes attributes = base;
    attributes[name] = value;
    return Refusal(attributes);
  };
  const Attributes product = tests::AllReduce(4, 6, 8, 10), cyclic = tests::Cyclic(2, 3, 6, 8, 10);
  constexpr int64_t kLargest = int64_t{1} << 40;
  CHECK_EQ(with(product, "m", kLargest), "");
  CHECK_CONTAINS(with(product, "m", kLargest + 1), "attribute m must be at most 1099511627776, got 1099511627777");
  CHECK_CONTAINS(with(product, "k", int64_t{1} << 62), "attribute k must be at most");
  CHECK_CONTAINS(with(product, "epilog", (int64_t{1} << 32) + 4), "attribute epilog must be at most 2147483647");
  CHECK_CONTAINS(with(product, "comm_sm_count", int64_t{1} << 31), "must be at most 2147483647, got 2147483648");
  CHECK_CONTAINS(with(product, "amax_d", int64_t{2}), "attribute amax_d must be at most 1, got 2");
  CHECK_EQ(with(cyclic, "layout_a", std::vector<int64_t>{kLargest, 4, 0, 0}), "");
  for (int64_t block : {kLargest + 1, int64_t{1} << 62, INT64_MAX}) {
    CHECK_CONTAINS(with(cyclic, "layout_a", std::vector<int64_t>{block, 4, 0, 0}), "must hold blocks of 1 to 2^40");
    CHECK_CONTAINS(with(cyclic, "layout_d", std::vector<int64_t>{2, block, 0, 0}), "must hold blocks of 1 to 2^40");
  }
  Attributes integers = product;
  integers["compute"] = std::string("32I");
  CHECK_EQ(Refusal(integers), "");
  for (double alpha : {0.5, 3e9, -1e300, std::nan("")}) {
    CHECK_CONTAINS(with(integers, "alpha", std::vector<double>{alpha, 0}), "alpha must be an integer of 32 bits");
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
    Attributes changed = base;
    changed[name] = value;
    CHECK(*MakeProblem(changed) != problem);
  }
  Attributes cyclic = tests::Cyclic(2, 2, 6, 8, 10), other = cyclic;
  other["layout_d"] = std::vector<int64_t>{2, 3, 0, 1};
  CHECK(*MakeProblem(cyclic) != *MakeProblem(other));
  CHECK(*MakeProblem(cyclic) != *MakeProblem(tests::Grid(2, 2, 6, 8, 10)));
}

}  // namespace
}  // namespace jaxmp
