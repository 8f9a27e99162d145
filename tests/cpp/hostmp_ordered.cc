// Sums in one order: each kernel against the plain loops that its header describes, to the bit; whatever the extents,
// and wherever k is cut. And what K blocks are for: small rounding errors.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/convert.h"
#include "tests/cpp/check.h"

namespace jaxmp::test {
namespace {

using hostmp::BFloat16;
using hostmp::Complex128;
using hostmp::Complex64;
using hostmp::Float16;
using hostmp::KSegments;
using hostmp::Product;

constexpr abi::cublasOperation_t kOps[] = {abi::CUBLAS_OP_N, abi::CUBLAS_OP_T, abi::CUBLAS_OP_C};

template <typename T>
struct Type;
template <>
struct Type<float> {
  using Sum = float;
  static constexpr abi::cudaDataType_t number = abi::CUDA_R_32F;
  static constexpr const char* name = "f32";
};
template <>
struct Type<double> {
  using Sum = double;
  static constexpr abi::cudaDataType_t number = abi::CUDA_R_64F;
  static constexpr const char* name = "f64";
};
template <>
struct Type<Complex64> {
  using Sum = Complex64;
  static constexpr abi::cudaDataType_t number = abi::CUDA_C_32F;
  static constexpr const char* name = "c64";
};
template <>
struct Type<Complex128> {
  using Sum = Complex128;
  static constexpr abi::cudaDataType_t number = abi::CUDA_C_64F;
  static constexpr const char* name = "c128";
};
template <>
struct Type<BFloat16> {
  using Sum = float;
  static constexpr abi::cudaDataType_t number = abi::CUDA_R_16BF;
  static constexpr const char* name = "bf16";
};
template <>
struct Type<Float16> {
  using Sum = float;
  static constexpr abi::cudaDataType_t number = abi::CUDA_R_16F;
  static constexpr const char* name = "f16";
};

void set(double real, double, float* x) { *x = static_cast<float>(real); }
void set(double real, double, double* x) { *x = real; }
template <typename T>
void set(double real, double imag, std::complex<T>* x) {
  *x = {static_cast<T>(real), static_cast<T>(imag)};
}
template <typename T>
void set(double real, double, T* x) {  // 16 bits
  const float value = static_cast<float>(real);
  hostmp::Downconvert(&value, x, 1);
}

template <typename T>
T value(const T& x, bool) {
  return x;
}
template <typename T>
std::complex<T> value(const std::complex<T>& x, bool conjugates) {
  return conjugates ? std::conj(x) : x;
}
float value(const BFloat16& x, bool) {
  float wide;
  hostmp::Widen(&x, &wide, 1);
  return wide;
}
float value(const Float16& x, bool) {
  float wide;
  hostmp::Widen(&x, &wide, 1);
  return wide;
}

// The header's step: one fused multiply-add; without the instruction, a product and a sum.
template <typename T>
T step(T x, T y, T sum, bool is_fused) {
  const volatile T product = x * y;
  return is_fused ? std::fma(x, y, sum) : sum + product;
}
template <typename T>
std::complex<T> step(std::complex<T> x, std::complex<T> y, std::complex<T> sum, bool is_fused) {
  const T real = step(-x.imag(), y.imag(), step(x.real(), y.real(), sum.real(), is_fused), is_fused);
  const T imag = step(x.imag(), y.real(), step(x.real(), y.imag(), sum.imag(), is_fused), is_fused);
  return {real, imag};
}

template <typename T>
struct Case {
  Case(abi::cublasOperation_t trans_a, abi::cublasOperation_t trans_b, int64_t m, int64_t n, int64_t k, unsigned seed)
      : trans_a(trans_a), trans_b(trans_b), m(m), n(n), k(k) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> draw(-1, 1);
    a.resize(static_cast<size_t>(lda() * (trans_a == abi::CUBLAS_OP_N ? k : m)));
    b.resize(static_cast<size_t>(ldb() * (trans_b == abi::CUBLAS_OP_N ? n : k)));
    c.resize(static_cast<size_t>(ldc() * n));
    for (T& x : a) set(draw(random), draw(random), &x);
    for (T& x : b) set(draw(random), draw(random), &x);
    for (auto& x : c) set(draw(random), draw(random), &x);
  }

  int64_t lda() const { return (trans_a == abi::CUBLAS_OP_N ? m : k) + 3; }
  int64_t ldb() const { return (trans_b == abi::CUBLAS_OP_N ? k : n) + 1; }
  int64_t ldc() const { return m + 2; }
  std::string name() const {
    return std::string(Type<T>::name) + " ops " + std::to_string(trans_a) + std::to_string(trans_b) + " " +
           std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
  }

  Product product(int64_t begin, int64_t end, typename Type<T>::Sum* to) const {
    return {trans_a,     trans_b,
            m,           n,
            end - begin, a.data() + begin * (trans_a == abi::CUBLAS_OP_N ? lda() : 1),
            lda(),       b.data() + begin * (trans_b == abi::CUBLAS_OP_N ? 1 : ldb()),
            ldb(),       to,
            ldc()};
  }

  KSegments parts(const std::vector<int64_t>& cuts, typename Type<T>::Sum* to) const {
    KSegments found;
    int64_t begin = 0;
    for (int64_t cut : cuts) {
      found.push_back(product(begin, cut, to));
      begin = cut;
    }
    return found;
  }

  // The header's order, in K blocks of 256. With `adds`, onto c.
  std::vector<typename Type<T>::Sum> expected(bool is_fused, bool adds) const {
    auto sums = c;
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        auto& total = sums[static_cast<size_t>(col * ldc() + row)];
        for (int64_t at = 0; at < k; at += 256) {
          const auto sum = k_block_sum(row, col, at, std::min(at + 256, k), is_fused);
          total = at > 0 || adds ? total + sum : sum;
        }
      }
    }
    return sums;
  }

  typename Type<T>::Sum k_block_sum(int64_t row, int64_t col, int64_t begin, int64_t end, bool is_fused) const {
    typename Type<T>::Sum sum = 0;
    for (int64_t l = begin; l < end; ++l) {
      const T& x = a[static_cast<size_t>(trans_a == abi::CUBLAS_OP_N ? l * lda() + row : row * lda() + l)];
      const T& y = b[static_cast<size_t>(trans_b == abi::CUBLAS_OP_N ? col * ldb() + l : l * ldb() + col)];
      sum = step(value(x, trans_a == abi::CUBLAS_OP_C), value(y, trans_b == abi::CUBLAS_OP_C), sum, is_fused);
    }
    return sum;
  }

  abi::cublasOperation_t trans_a, trans_b;
  int64_t m, n, k;
  std::vector<T> a, b;
  std::vector<typename Type<T>::Sum> c;
};

template <typename T>
bool same(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

constexpr int64_t kExtents[][3] = {{1, 1, 1},     {1, 40, 7},   {3, 5, 2},    {5, 4, 300},   {16, 8, 17},
                                   {47, 9, 33},   {48, 16, 64}, {49, 17, 65}, {100, 3, 257}, {7, 515, 30},
                                   {50, 60, 513}, {390, 18, 5}, {515, 7, 9}};

// Scratch of exactly the size that was asked for, aligned, with a guard behind it.
struct Scratch {
  explicit Scratch(int64_t bytes) : bytes(static_cast<size_t>(bytes)), memory(this->bytes + 128, 0x5a) {}
  char* data() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64); }
  bool is_intact() { return data()[bytes] == 0x5a; }
  size_t bytes;
  std::vector<char> memory;
};

// Where k is cut: inside K blocks, between them, and in pieces of one.
const std::vector<int64_t> kCuts[] = {{}, {1, 2, 3, 100, 250, 256, 257, 300, 511, 513}};
std::vector<int64_t> cuts_of(int64_t k, std::vector<int64_t> cuts) {
  cuts.erase(std::find_if(cuts.begin(), cuts.end(), [k](int64_t cut) { return cut >= k; }), cuts.end());
  cuts.push_back(k);
  return cuts;
}

template <typename T>
void test_kernel(hostmp::SimdLevel level, const char* instructions) {
  if (!Has(level)) {
    std::printf("SKIPPED: %s, which this processor does not have\n", instructions);
    return;
  }
  for (auto trans_a : kOps) {
    for (auto trans_b : kOps) {
      for (const auto& extent : kExtents) {
        const Case<T> test(trans_a, trans_b, extent[0], extent[1], extent[2], 1);
        const bool is_fused = level != hostmp::SimdLevel::kPortable, adds = test.n % 2 == 0;
        const auto expected = test.expected(is_fused, adds);
        auto doubled = expected;
        for (int64_t i = 0; i < test.m * test.n; ++i) {
          doubled[static_cast<size_t>(i / test.m * test.ldc() + i % test.m)] *= 2;
        }
        for (const auto& cuts : kCuts) {
          auto c = test.c;
          const KSegments parts = test.parts(cuts_of(test.k, cuts), c.data());
          Scratch scratch(hostmp::SimdGemmScratch(level, Type<T>::number, test.m, test.n, test.k));
          hostmp::SimdGemm(level, Type<T>::number, parts, 1.0, adds, scratch.data());
          check::report(same(c, expected), __FILE__, __LINE__, instructions + (" " + test.name()));
          check::report(scratch.is_intact(), __FILE__, __LINE__, test.name() + ": scratch overrun");
          if (!adds) {
            c = test.c;
            hostmp::SimdGemm(level, Type<T>::number, parts, 2.0, adds, scratch.data());
            check::report(same(c, doubled), __FILE__, __LINE__, instructions + (" times 2, " + test.name()));
          }
          if (test.n > hostmp::kSmallN || trans_a != abi::CUBLAS_OP_N || hostmp::Facts(Type<T>::number).is_complex) {
            continue;
          }
          c = test.c;
          hostmp::SimdSmallNGemm(level, Type<T>::number, parts, 1.0, adds);
          check::report(same(c, expected), __FILE__, __LINE__, instructions + (" few columns, " + test.name()));
        }
      }
    }
  }
}

// The kernel for n columns and A as it is.
template <typename T>
hostmp::KernelChoice fixed_order(int64_t n) {
  return hostmp::KernelOf({Type<T>::number, Type<T>::number, abi::CUBLAS_OP_N, n,
                           /*is_fixed_order=*/true, /*is_alpha_one=*/true});
}

// Whatever an instruction does within a K block: the whole is the sum of the K blocks, each alone, in ascending order.
template <typename T>
void check_k_blocks(const Case<T>& test, const std::vector<typename Type<T>::Sum>& whole) {
  const int64_t k_block = hostmp::KBlockDepth(fixed_order<T>(test.n).kernel);
  auto total = test.c;
  for (int64_t at = 0; at < test.k; at += k_block) {
    const int64_t end = std::min(at + k_block, test.k);
    auto sums = test.c;
    Scratch scratch(hostmp::ScratchBytes(fixed_order<T>(test.n), test.m, test.n, end - at));
    hostmp::Multiply(fixed_order<T>(test.n), {test.product(at, end, sums.data())}, 1, false, scratch.data());
    for (int64_t col = 0; col < test.n; ++col) {
      for (int64_t row = 0; row < test.m; ++row) {
        const auto i = static_cast<size_t>(col * test.ldc() + row);
        total[i] = at > 0 ? total[i] + sums[i] : sums[i];
      }
    }
  }
  check::report(same(whole, total), __FILE__, __LINE__, std::string(Type<T>::name) + " K block by K block");
}

template <typename T>
void test_extents_and_cuts() {
  constexpr int64_t kM = 70, kN = 20;
  const hostmp::Kernel kernel = fixed_order<T>(kN).kernel;
  const int64_t unit = hostmp::KUnit(kernel), k = 2 * hostmp::KBlockDepth(kernel) + 188;
  const Case<T> test(abi::CUBLAS_OP_N, abi::CUBLAS_OP_T, kM, kN, k, 2);
  const auto run = [&](int64_t m, int64_t n, const std::vector<int64_t>& cuts) {
    auto c = test.c;
    KSegments parts = test.parts(cuts, c.data());
    for (Product& part : parts) {
      part.m = m;
      part.n = n;
    }
    Scratch scratch(hostmp::ScratchBytes(fixed_order<T>(n), m, n, k));
    hostmp::Multiply(fixed_order<T>(n), parts, 1, false, scratch.data());
    check::report(scratch.is_intact(), __FILE__, __LINE__, test.name() + ": scratch overrun");
    return c;
  };
  const auto whole = run(kM, kN, {k});
  for (int64_t m = 1; m <= kM; ++m) {
    const int64_t n = 1 + m % kN;
    const auto part = run(m, n, {k});
    bool is_same = true;
    for (int64_t col = 0; col < n; ++col) {
      const auto at = static_cast<size_t>(col * test.ldc());
      is_same = is_same && std::memcmp(&part[at], &whole[at], static_cast<size_t>(m) * sizeof(part[0])) == 0;
    }
    check::report(is_same, __FILE__, __LINE__, std::string(Type<T>::name) + " with " + std::to_string(m) + " rows");
  }
  std::vector<int64_t> cuts;
  for (int64_t cut = unit; cut < k; cut += (cuts.size() % 2 ? 13 : 1) * unit) {
    check::report(same(run(kM, kN, {cut, k}), whole), __FILE__, __LINE__,
                  std::string(Type<T>::name) + " cut at " + std::to_string(cut));
    cuts.push_back(cut);
  }
  cuts.push_back(k);
  check::report(same(run(kM, kN, cuts), whole), __FILE__, __LINE__, std::string(Type<T>::name) + " cut everywhere");
  check_k_blocks(test, whole);
}

template <typename T>
void test_type() {
  test_kernel<T>(hostmp::SimdLevel::kAvx512, "avx512");
  test_kernel<T>(hostmp::SimdLevel::kAvx2, "avx2");
  test_kernel<T>(hostmp::SimdLevel::kNeon, "neon");
  test_kernel<T>(hostmp::SimdLevel::kPortable, "portable");
  test_extents_and_cuts<T>();
}

TEST(test_types) {
  test_type<float>();
  test_type<Complex64>();
  test_type<BFloat16>();
  if (check::kIsSlow) return;  // the same code, for other types
  test_type<double>();
  test_type<Complex128>();
  test_type<Float16>();
}

}  // namespace
}  // namespace jaxmp::test
