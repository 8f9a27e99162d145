// The epilogs from their definitions, and the unit of the bounds that judge them.
#ifndef JAXMP_TESTS_DEFINITIONS_H_
#define JAXMP_TESTS_DEFINITIONS_H_

#include <cmath>

#include "tests/cpp/placement.h"

namespace jaxmp::test {

// An epilog's number is a set of bits, as in cuBLASLt.
inline bool has_bias(int epilog) { return epilog & CUBLASMP_MATMUL_EPILOGUE_BIAS; }
inline bool has_aux(int epilog) { return epilog & 128; }
inline bool is_relu(int epilog) { return epilog & (2 | 8); }
inline bool is_derivative(int epilog) { return epilog & (8 | 64); }
inline bool has_gradient(int epilog) { return epilog & (16 | 256 | 512); }

inline double unit_roundoff(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F:
    case CUDA_C_64F:
      return std::ldexp(1, -53);
    case CUDA_R_16BF:
      return std::ldexp(1, -8);
    case CUDA_R_16F:
      return std::ldexp(1, -11);
    case CUDA_R_8F_E4M3:
      return std::ldexp(1, -4);
    case CUDA_R_8F_E5M2:
      return std::ldexp(1, -3);
    default:
      return std::ldexp(1, -24);
  }
}

inline Number activation(int epilog, Number z) {
  const double x = z.real();
  if (is_relu(epilog)) return x > 0 ? x : 0;
  if (!(epilog & CUBLASMP_MATMUL_EPILOGUE_GELU)) return z;
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// The factor of z in a derivative: gelu' in the form s + x s (1 - s) 2u', which does not cancel.
inline double slope(int epilog, double x) {
  if (is_relu(epilog)) return x > 0 ? 1 : 0;
  const double inner = 2 * std::sqrt(2 / M_PI);
  const double s = 1 / (1 + std::exp(-inner * (x + 0.044715 * x * x * x)));
  return s + x * s * (1 - s) * inner * (1 + 3 * 0.044715 * x * x);
}

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_DEFINITIONS_H_
