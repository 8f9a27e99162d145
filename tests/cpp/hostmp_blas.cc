// The BLAS is called from many threads at once; without this, a kernel of it that is not made for that would give wrong
// numbers now and then, or crash. (OpenBLAS 0.3.34's small sgemm with two transposed operands was such a one.)
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/check.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

constexpr abi::cublasOperation_t kOps[] = {abi::CUBLAS_OP_N, abi::CUBLAS_OP_T};

template <typename T>
bool is_right(std::mt19937* random, abi::cublasOperation_t trans_a, abi::cublasOperation_t trans_b, int64_t most) {
  const auto draw = [&](int64_t from, int64_t to) {
    return from + static_cast<int64_t>((*random)() % (to - from + 1));
  };
  const int64_t m = draw(1, most), n = draw(1, most), k = draw(1, most);
  const bool is_a_plain = trans_a == abi::CUBLAS_OP_N, is_b_plain = trans_b == abi::CUBLAS_OP_N;
  std::vector<T> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(k * n)), c(static_cast<size_t>(m * n));
  for (T& x : a) x = static_cast<T>(draw(-4, 4));
  for (T& x : b) x = static_cast<T>(draw(-3, 3));
  hostmp::Gemm({trans_a, trans_b, m, n, k, a.data(), is_a_plain ? m : k, b.data(), is_b_plain ? k : n, c.data(), m},
               T(1), T(0));
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      T sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[static_cast<size_t>(is_a_plain ? l * m + i : i * k + l)] *
               b[static_cast<size_t>(is_b_plain ? j * k + l : l * n + j)];
      }
      if (c[static_cast<size_t>(j * m + i)] != sum) return false;
    }
  }
  return true;
}

template <typename T>
void test_on_threads(const std::string& name, int times, int64_t most) {
  for (auto trans_a : kOps) {
    for (auto trans_b : kOps) {
      std::vector<std::thread> threads;
      for (unsigned seed = 1; seed <= 4; ++seed) {
        threads.emplace_back([=] {
          std::mt19937 random(seed);
          for (int i = 0; i < times; ++i) {
            check::report(is_right<T>(&random, trans_a, trans_b, most), __FILE__, __LINE__,
                          name + (trans_a ? " T" : " N") + (trans_b ? "T" : "N"));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

TEST(test_threads) {
  const int times = check::kUnderThreadSanitizer ? 300 : 20000;
  test_on_threads<float>("f32", times, 14);
  test_on_threads<double>("f64", times, 14);
  test_on_threads<float>("f32", times / 300, 180);
}

}  // namespace
}  // namespace jaxmp::test
