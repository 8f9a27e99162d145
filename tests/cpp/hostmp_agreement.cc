// Ranks that pass different things would leave the real library hanging, or answer wrongly: hostmp tells all of them
// which argument differs, and what each has.
#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/hostmp_arguments.h"

namespace jaxmp::test {
namespace {

// Rank 1 passes something else; both ranks hear which argument, and both values.
template <typename Change>
std::string disagreement(const Case& c, Change change) {
  World world(c);
  Arguments first(world, 0), second(world, 1);
  std::array<std::string, 2> errors;
  std::atomic<int> count{0};
  struct Context {
    std::string* error;
    std::atomic<int>* count;
  } contexts[] = {{&errors[0], &count}, {&errors[1], &count}};
  const auto done = [](void* context, const Status& status) {
    auto* const self = static_cast<Context*>(context);
    *self->error = status.message();
    ++*self->count;
  };
  first.stream.done = second.stream.done = done;
  first.stream.context = &contexts[0], second.stream.context = &contexts[1];
  change(second);
  check_ok(first.run());
  check_ok(second.run());
  while (count < 2) std::this_thread::yield();
  CHECK_EQ(errors[0], errors[1]);
  return errors[0];
}

void test_agreement() {
  const Case c = {Pattern::kAllGather, 2, 1, 8, 12, 16};
  std::string error = disagreement(c, [](Arguments& in) { in.k = 8; });
  CHECK_CONTAINS(error, "ranks disagree on k: rank 0 has 16, rank 1 has 8");
  const float alpha = 3;
  error = disagreement(c, [](Arguments& in) { in.attribute(4, int{8}); });
  CHECK_CONTAINS(error, "disagree on COMMUNICATION_SM_COUNT: rank 0 has 0, rank 1 has 8");
  const Case sums = {Pattern::kReduceScatter, 2, 1, 8, 12, 16};
  error = disagreement(sums, [](Arguments& in) { in.attribute(27, int{CUDA_R_32F}); });
  CHECK_CONTAINS(error, "disagree on COMMUNICATION_TYPE: rank 0 has -1, rank 1 has 0");
  error = disagreement(c, [&alpha](Arguments& in) { in.alpha = &alpha; });
  CHECK_CONTAINS(error, "disagree on alpha: rank 0 has 1, rank 1 has 3");
  error = disagreement(c, [](Arguments& in) { in.attribute(5, int{CUBLASMP_MATMUL_EPILOGUE_RELU}); });
  CHECK_CONTAINS(error, "disagree on EPILOGUE: rank 0 has 0, rank 1 has 2");
  Case square = {Pattern::kAllGather, 2, 1, 8, 8, 8};
  World other(square);
  error = disagreement(square, [&other](Arguments& in) {
    const Rank& rank = other.ranks[1];
    in.desc_a = rank.desc_a.get(), in.desc_b = rank.desc_b.get(), in.desc_d = rank.desc_d.get();
  });
  CHECK_CONTAINS(error, "different communicators");
}

void test_fail() {
  World world({Pattern::kLocal, 1, 1});
  std::string error;
  hostmp::Stream stream = {
      nullptr, 0, 0, nullptr, [](void* to, const Status& status) {
                             *static_cast<std::string*>(to) = status.message(); },
      &error};
  hostmp::Fail(stream, 0, 1, InvalidArgument("why"));
  CHECK_EQ(error, std::string("why"));
}

}  // namespace
}  // namespace jaxmp::test

int main() {
  using namespace jaxmp;  // NOLINT
  CHECK_EQ(hostmp::LoadBlas(check::environment("JAXMP_BLAS")).message(), "");
  test::test_agreement();
  test::test_fail();
  return check::summary("hostmp_agreement");
}
