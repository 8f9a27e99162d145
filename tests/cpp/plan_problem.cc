// The cache key: what decodes, what is refused, and when two problems are the same.
#include "csrc/problem.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

std::string Refusal(const Attributes& attributes) { return MakeProblem(attributes).status().message(); }

void DecodesEveryAttribute() {
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

void RefusesWhatItDoesNotKnow() {
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
  CHECK_CONTAINS(Refusal(attributes), "expected 26 attributes, got 27");
}

void RefusesAxesThatTheMeshLacks() {
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

void ComparesEveryFieldByItsBits() {
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
                              {"determinism", std::string("none")}};
  for (const auto& [name, value] : changes) {
    Attributes changed = base;
    changed[name] = value;
    CHECK(*MakeProblem(changed) != problem);
  }
}

}  // namespace
}  // namespace jaxmp

int main() {
  jaxmp::DecodesEveryAttribute();
  jaxmp::RefusesWhatItDoesNotKnow();
  jaxmp::RefusesAxesThatTheMeshLacks();
  jaxmp::ComparesEveryFieldByItsBits();
  return jaxmp::check::summary("plan_problem");
}
