// The BLAS is called from many threads at once; without this, a kernel of it that is not made for that would give wrong
// numbers now and then, or crash. (OpenBLAS 0.3.34's small sgemm with two transposed operands was such a one.)

#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/kernel_case.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

template <typename T>
void test_on_threads(unsigned times, unsigned most) {
  for (const auto trans_a : {abi::CUBLAS_OP_N, abi::CUBLAS_OP_T}) {
    for (const auto trans_b : {abi::CUBLAS_OP_N, abi::CUBLAS_OP_T}) {
      std::vector<std::thread> threads;
      for (unsigned thread = 0; thread < 4; ++thread) {
        threads.emplace_back([=] {
          std::mt19937 random(thread);
          for (unsigned i = 0; i < times; ++i) {
            const auto any = [&] { return 1 + static_cast<int64_t>(random() % most); };
            const Case<T> test(trans_a, trans_b, any(), any(), any(), draw_integer, 4 * i + thread);
            std::vector<T> c = test.given(0);
            hostmp::Gemm(test.product(0, test.k, c.data()), T(1), T(0));
            check::report(c == test.expected(1, 0, /*is_fused=*/false), __FILE__, __LINE__, test.name());
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

TEST(test_threads) {
  const unsigned times = check::kUnderThreadSanitizer ? 300 : 20000;
  test_on_threads<float>(times, 14);
  test_on_threads<double>(times, 14);
  test_on_threads<float>(times / 300, 180);
}

}  // namespace
}  // namespace jaxmp::test
