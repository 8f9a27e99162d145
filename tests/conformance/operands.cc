#include "tests/conformance/operands.h"

#include <array>
#include <random>

namespace jaxmp::conformance {
namespace {

// Integers up to `most` in absolute value.
void fill(Matrix* matrix, cudaDataType_t type, int most, unsigned seed) {
  std::mt19937 random(seed);
  const auto digit = [&random, most] { return static_cast<int>(random() % (2 * most + 1)) - most; };
  for (Number& value : matrix->values) {
    const double real = digit();
    value = {real, Facts(type).is_complex ? digit() : 0.0};
  }
}

// Small enough for a D of 16 bits to be exact, and for a sum of its columns too.
int largest_digit(const Case& c) { return Facts(c.out).is_16bit || Facts(c.in).is_low_precision ? 1 : 3; }

bool is_transposed(cublasOperation_t op) { return op != CUBLAS_OP_N; }

Number op(const Matrix& x, cublasOperation_t trans, int64_t i, int64_t j) {
  if (trans == CUBLAS_OP_N) return x.at(i, j);
  return trans == CUBLAS_OP_T ? x.at(j, i) : std::conj(x.at(j, i));
}

// op(A) or op(B)^T times its scales, by row of the result and by k.
Matrix scaled(const Case& c, const Matrix& x, bool is_a) {
  const int mode = is_a ? c.scale_a : c.scale_b;
  Matrix result(is_a ? c.m : c.n, c.k);
  for (int64_t l = 0; l < c.k; ++l) {
    for (int64_t i = 0; i < result.rows; ++i) {
      const Number value = is_a ? op(x, c.trans_a, i, l) : op(x, c.trans_b, l, i);
      result.at(i, l) = value * scale_of(mode, l, i, is_a ? kSeedA : kSeedB);
    }
  }
  return result;
}

// result = a b^T and magnitude = |a| |b|^T, in complex arithmetic only for complex numbers.
template <typename Scalar>
void multiply(const std::vector<Scalar>& a, const std::vector<Scalar>& b, int64_t k, Matrix* result,
              Matrix* magnitude) {
  const auto m = static_cast<size_t>(result->rows), n = static_cast<size_t>(result->cols);
  std::vector<Scalar> column(m);
  std::vector<double> sizes(m);
  for (size_t j = 0; j < n; ++j) {
    std::fill(column.begin(), column.end(), Scalar(0));
    std::fill(sizes.begin(), sizes.end(), 0.0);
    for (size_t l = 0; l < static_cast<size_t>(k); ++l) {
      const Scalar y = b[l * n + j];
      const double size = std::abs(y);
      for (size_t i = 0; i < m; ++i) {
        column[i] += a[l * m + i] * y;
        sizes[i] += std::abs(a[l * m + i]) * size;
      }
    }
    std::copy(column.begin(), column.end(), result->values.begin() + static_cast<std::ptrdiff_t>(j * m));
    std::copy(sizes.begin(), sizes.end(), magnitude->values.begin() + static_cast<std::ptrdiff_t>(j * m));
  }
}

std::vector<double> real_parts(const Matrix& x) {
  std::vector<double> result;
  for (const Number& value : x.values) result.push_back(value.real());
  return result;
}

}  // namespace

int64_t inner_block(int mode) {
  switch (mode) {
    case CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3:
      return 16;
    case CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0:
      return 32;
    case CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32:
    case CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32:
      return 128;
    default:
      return int64_t{1} << 40;  // all of k
  }
}

int64_t outer_block(int mode) {
  if (mode == CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32) return int64_t{1} << 40;
  return mode == CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32 ? 128 : 1;
}

double scale_of(int mode, int64_t inner, int64_t outer, unsigned seed) {
  if (mode == kUnscaled) return 1;
  const int64_t block = inner / inner_block(mode) * 5 + outer / outer_block(mode) * 7 + seed;
  return std::ldexp(1.0, static_cast<int>(block % 3) - 1);
}

Number stored(cudaDataType_t type, Number value) {
  std::array<char, 16> bytes{};
  test::encode(type, value, bytes.data());
  return test::decode(type, bytes.data());
}

void fill_random(Matrix* matrix, cudaDataType_t type, unsigned seed) {
  if (Facts(type).is_low_precision) return;
  std::mt19937 random(seed);
  std::normal_distribution<double> draw;
  for (Number& value : matrix->values) {
    const double real = draw(random);
    value = stored(type, {real, Facts(type).is_complex ? draw(random) : 0});
  }
}

Operands::Operands(const Case& given) : c(given.m, given.n), aux(given.m, given.n) {
  const bool ta = is_transposed(given.trans_a), tb = is_transposed(given.trans_b);
  a = ta ? Matrix(given.k, given.m) : Matrix(given.m, given.k);
  b = tb ? Matrix(given.n, given.k) : Matrix(given.k, given.n);
  const int most = largest_digit(given);
  fill(&a, given.in, most, 1);
  fill(&b, given.in_b, most, 2);
  fill(&c, given.out, most, 3);
  fill(&aux, given.out, most, 4);
  for (int64_t i = 0; i < given.m; ++i) bias.push_back(double(i % 5) - 2);
  if (given.is_random) {
    fill_random(&a, given.in, 1);
    fill_random(&b, given.in_b, 2);
    fill_random(&c, given.out, 3);
    fill_random(&aux, given.out, 4);
  }
  if (given.fill) given.fill(*this);
}

Expected::Expected(const Case& c, const Operands& x)
    : z(c.m, c.n),
      magnitude(c.m, c.n),
      d(c.m, c.n),
      slack(c.m, c.n),
      is_exact(!c.is_random && !(c.epilog & (32 | 64))) {
  const Matrix a = scaled(c, x.a, true), b = scaled(c, x.b, false);
  const bool reads_c = c.has_c && c.beta != 0.0;
  if (Facts(c.in).is_complex) {
    multiply(a.values, b.values, c.k, &z, &magnitude);
  } else {
    multiply(real_parts(a), real_parts(b), c.k, &z, &magnitude);
  }
  for (int64_t j = 0; j < c.n; ++j) {
    for (int64_t i = 0; i < c.m; ++i) {
      Number added = reads_c ? c.beta * x.c.at(i, j) * (c.has_scale_c ? kScaleC : 1) : 0;
      if (test::has_bias(c.epilog)) added += x.bias[static_cast<size_t>(i)];
      z.at(i, j) = c.alpha * z.at(i, j) + added;
      magnitude.at(i, j) = std::abs(c.alpha) * magnitude.at(i, j) + std::abs(added);
      const double by = test::is_derivative(c.epilog) ? test::slope(c.epilog, x.aux.at(i, j).real()) : 1;
      d.at(i, j) = test::is_derivative(c.epilog) ? z.at(i, j) * by : test::activation(c.epilog, z.at(i, j));
      // gelu's slope is computed to a few roundings of its terms; the largest term is about 1.
      const double of_slope = std::abs(by) + (test::is_relu(c.epilog) ? 0 : 1);
      slack.at(i, j) = is_exact                        ? 0
                       : test::is_derivative(c.epilog) ? magnitude.at(i, j) * of_slope
                       : c.is_random                   ? 0
                                                       : magnitude.at(i, j);
    }
  }
  if (!test::has_gradient(c.epilog)) return;
  const bool is_of_a = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADA,
             is_of_b = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB;
  const Matrix& summed = is_of_a ? a : is_of_b ? b : d;
  const double u_acc = test::unit_roundoff(c.accumulator()), u_out = test::unit_roundoff(c.out);
  for (int64_t i = 0; i < summed.rows; ++i) {
    Number sum = 0;
    double allowed = 0;
    for (int64_t j = 0; j < summed.cols; ++j) {
      const Number term = is_of_a || is_of_b ? summed.at(i, j) : stored(c.out, summed.at(i, j));
      sum += term;
      if (is_exact) continue;
      allowed += u_acc * std::abs(term);
      if (!is_of_a && !is_of_b)
        allowed += u_acc * (slack.at(i, j).real() + magnitude.at(i, j).real()) + u_out * std::abs(term);
    }
    gradient.push_back(sum);
    gradient_slack.push_back(is_exact ? 0 : 8 * (allowed + u_out * std::abs(sum)));
  }
}

}  // namespace jaxmp::conformance
