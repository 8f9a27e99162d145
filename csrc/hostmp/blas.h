// The only place that knows which library multiplies matrices. Nothing is linked: load_blas (host.h) opens it.
#ifndef JAXMP_HOSTMP_BLAS_H_
#define JAXMP_HOSTMP_BLAS_H_

#include <cstdint>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/types.h"

namespace jaxmp::hostmp {

bool blas_is_loaded();

// c = alpha op(a) op(b) + beta c, column-major; c is not read where beta is 0. Extents and leading dimensions must
// fit an int, which validation sees to.
struct Product {
  abi::cublasOperation_t trans_a, trans_b;
  int64_t m, n, k;
  const void* a;
  int64_t lda;
  const void* b;
  int64_t ldb;
  void* c;
  int64_t ldc;
};
void gemm(const Product& product, float alpha, float beta);
void gemm(const Product& product, double alpha, double beta);
void gemm(const Product& product, Complex64 alpha, Complex64 beta);
void gemm(const Product& product, Complex128 alpha, Complex128 beta);

// A product whose k, at least one, lies in several parts, in ascending order. They share m, n, c and its leading
// dimension.
using Parts = std::vector<Product>;

// 16-bit a and b into a float c. `scratch` has gemm16_scratch() bytes, aligned to 64.
void gemm16(abi::cudaDataType_t type, const Parts& parts, float alpha, float beta, char* scratch);

// Enough for any product of at most m x n and k.
int64_t gemm16_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_BLAS_H_
