// The BLAS that multiplies f32, f64 and complex matrices, and MKL's products of 16-bit numbers. Nothing is linked:
// load_blas opens both.
#ifndef JAXMP_HOSTMP_GEMM_CBLAS_H_
#define JAXMP_HOSTMP_GEMM_CBLAS_H_

#include <string>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// Opens the BLAS and, where mkl_path is not empty, MKL beside it for the 16-bit products. The first success holds for
// the process; further calls change nothing. Matmul refuses to run before it.
Status load_blas(const char* blas_path, const char* mkl_path);
bool blas_is_loaded();
bool blas_is_openblas();

// The open libraries; all empty before load_blas.
struct BlasLibraries {
  std::string path;
  std::string config;  // as the library describes itself, with the processor it detected
  std::string mkl;     // path, or empty
};
BlasLibraries blas_libraries();

void gemm(const Product& product, float alpha, float beta);
void gemm(const Product& product, double alpha, double beta);
void gemm(const Product& product, Complex64 alpha, Complex64 beta);
void gemm(const Product& product, Complex128 alpha, Complex128 beta);

// MKL's product of bf16 or f16 numbers into a float c.
bool mkl_has_gemm(abi::cudaDataType_t type);
void mkl_gemm(abi::cudaDataType_t type, const Product& product, float alpha, float beta);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GEMM_CBLAS_H_
