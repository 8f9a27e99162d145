// A product for one kernel: its operands, and its sums by the plain loops that the kernels' headers describe.
#ifndef JAXMP_TESTS_KERNEL_CASE_H_
#define JAXMP_TESTS_KERNEL_CASE_H_

#include <complex>
#include <random>
#include <type_traits>

#include "csrc/hostmp/kernels/k_blocks.h"
#include "csrc/hostmp/numeric/convert.h"
#include "tests/cpp/check.h"

namespace jaxmp::test {

using hostmp::BFloat16;
using hostmp::Complex128;
using hostmp::Complex64;
using hostmp::Float16;
using hostmp::KSegments;
using hostmp::Product;

template <typename S, abi::cudaDataType_t kNumber>
struct TypeOf {
  using Sum = S;
  using Real = std::conditional_t<std::is_integral_v<S>, S, decltype(std::real(S()))>;  // of alpha and beta
  static constexpr abi::cudaDataType_t number = kNumber;
};
template <typename T>
struct Type;
template <>
struct Type<float> : TypeOf<float, abi::CUDA_R_32F> {};
template <>
struct Type<double> : TypeOf<double, abi::CUDA_R_64F> {};
template <>
struct Type<Complex64> : TypeOf<Complex64, abi::CUDA_C_32F> {};
template <>
struct Type<Complex128> : TypeOf<Complex128, abi::CUDA_C_64F> {};
template <>
struct Type<BFloat16> : TypeOf<float, abi::CUDA_R_16BF> {};
template <>
struct Type<Float16> : TypeOf<float, abi::CUDA_R_16F> {};
template <>
struct Type<int8_t> : TypeOf<uint32_t, abi::CUDA_R_8I> {};  // modulo 2^32

template <typename T>
constexpr bool kIs16Bit = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;
template <typename T>
constexpr bool kIsComplex = std::is_same_v<T, Complex64> || std::is_same_v<T, Complex128>;

template <typename T>
T number_of(double real, double imag) {
  if constexpr (kIs16Bit<T>) {
    const auto wide = static_cast<float>(real);
    T narrow;
    hostmp::Downconvert(&wide, &narrow, 1);
    return narrow;
  } else if constexpr (kIsComplex<T>) {
    return T(real, imag);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(std::isnan(real) ? 77 : static_cast<int64_t>(real));
  } else {
    return static_cast<T>(real);
  }
}

template <typename T>
typename Type<T>::Sum value_of(const T& x, bool conjugates) {
  if constexpr (kIs16Bit<T>) {
    float wide;
    hostmp::Widen(&x, &wide, 1);
    return wide;
  } else if constexpr (kIsComplex<T>) {
    return conjugates ? std::conj(x) : x;
  } else {
    return static_cast<typename Type<T>::Sum>(x);
  }
}

// One fused multiply-add; without the instruction, a product and a sum.
template <typename T>
T step(T x, T y, T sum, bool is_fused) {
  if constexpr (std::is_integral_v<T>) {
    return sum + x * y;
  } else {
    const volatile T product = x * y;
    return is_fused ? std::fma(x, y, sum) : sum + product;
  }
}
template <typename T>
std::complex<T> step(std::complex<T> x, std::complex<T> y, std::complex<T> sum, bool is_fused) {
  const T real = step(-x.imag(), y.imag(), step(x.real(), y.real(), sum.real(), is_fused), is_fused);
  const T imag = step(x.imag(), y.real(), step(x.real(), y.imag(), sum.imag(), is_fused), is_fused);
  return {real, imag};
}

using Draw = std::function<double(std::mt19937&)>;

inline double draw_uniform(std::mt19937& random) { return std::uniform_real_distribution<double>(-1, 1)(random); }
// Sums are exact in any order.
inline double draw_integer(std::mt19937& random) { return static_cast<double>(random() % 17) - 8; }

template <typename T>
bool same(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

// Numbers of the type T, with leading dimensions of up to three more than the rows. An array ends where its last number
// does, so that a sanitizer sees a read past the end.
template <typename T>
struct Case {
  using Sum = typename Type<T>::Sum;
  using Real = typename Type<T>::Real;

  Case(abi::cublasOperation_t trans_a, abi::cublasOperation_t trans_b, int64_t m, int64_t n, int64_t k,
       const Draw& draw, unsigned seed)
      : trans_a(trans_a), trans_b(trans_b), m(m), n(n), k(k), gap(seed % 4) {
    std::mt19937 random(seed);
    a = drawn<T>(a_is_plain() ? m : k, a_is_plain() ? k : m, NAN, draw, &random);  // padding is not read
    b = drawn<T>(b_is_plain() ? k : n, b_is_plain() ? n : k, NAN, draw, &random);
    c = drawn<Sum>(m, n, 12345, draw, &random);
  }

  bool a_is_plain() const { return trans_a == abi::CUBLAS_OP_N; }
  bool b_is_plain() const { return trans_b == abi::CUBLAS_OP_N; }
  int64_t lda() const { return (a_is_plain() ? m : k) + gap; }
  int64_t ldb() const { return (b_is_plain() ? k : n) + gap; }
  int64_t ldc() const { return m + gap; }
  std::string name() const {
    return std::string(hostmp::Facts(Type<T>::number).name) + " ops " + std::to_string(trans_a) +
           std::to_string(trans_b) + " " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
  }

  // Returns C before the call. With beta = 0 nothing may read it.
  std::vector<Sum> given(Real beta) const {
    std::vector<Sum> x = c;
    for (int64_t i = 0; beta == Real(0) && i < m * n; ++i) at(&x, i % m, i / m) = number_of<Sum>(NAN, NAN);
    return x;
  }
  Sum& at(std::vector<Sum>* x, int64_t row, int64_t col) const { return (*x)[static_cast<size_t>(col * ldc() + row)]; }

  Product product(int64_t begin, int64_t end, Sum* to) const {
    const T* const first_a = a.data() + begin * (a_is_plain() ? lda() : 1);
    const T* const first_b = b.data() + begin * (b_is_plain() ? 1 : ldb());
    return {trans_a, trans_b, m, n, end - begin, first_a, lda(), first_b, ldb(), to, ldc()};
  }
  // From `begin` on in pieces that end at the cuts.
  KSegments parts(int64_t begin, const std::vector<int64_t>& cuts, Sum* to) const {
    KSegments found;
    for (int64_t cut : cuts) {
      found.push_back(product(begin, cut, to));
      begin = cut;
    }
    return found;
  }

  // alpha op(A) op(B) + beta C in K blocks of 256, in ascending order.
  std::vector<Sum> expected(Real alpha, Real beta, bool is_fused) const {
    std::vector<Sum> sums = c;
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        Sum& total = at(&sums, row, col);
        total = beta * total;
        for (int64_t begin = 0; begin < k; begin += hostmp::kKC) {
          const Sum sum = alpha * k_block_sum(row, col, begin, std::min(begin + hostmp::kKC, k), is_fused);
          total = begin == 0 && beta == Real(0) ? sum : total + sum;
        }
      }
    }
    return sums;
  }

  abi::cublasOperation_t trans_a, trans_b;
  int64_t m, n, k, gap;
  std::vector<T> a, b;
  std::vector<Sum> c;

 private:
  template <typename X>
  std::vector<X> drawn(int64_t rows, int64_t cols, double padding, const Draw& draw, std::mt19937* random) const {
    std::vector<X> x(static_cast<size_t>((cols - 1) * (rows + gap) + rows), number_of<X>(padding, padding));
    for (int64_t col = 0; col < cols; ++col) {
      for (int64_t row = 0; row < rows; ++row) {
        const double real = draw(*random);
        x[static_cast<size_t>(col * (rows + gap) + row)] = number_of<X>(real, kIsComplex<X> ? draw(*random) : 0);
      }
    }
    return x;
  }

  Sum k_block_sum(int64_t row, int64_t col, int64_t begin, int64_t end, bool is_fused) const {
    Sum sum = 0;
    for (int64_t l = begin; l < end; ++l) {
      const T& x = a[static_cast<size_t>(a_is_plain() ? l * lda() + row : row * lda() + l)];
      const T& y = b[static_cast<size_t>(b_is_plain() ? col * ldb() + l : l * ldb() + col)];
      sum = step(value_of(x, trans_a == abi::CUBLAS_OP_C), value_of(y, trans_b == abi::CUBLAS_OP_C), sum, is_fused);
    }
    return sum;
  }
};

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_KERNEL_CASE_H_
