// The BLAS that multiplies f32, f64 and complex matrices. It is not linked: LoadBlas opens it.
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// Opens the BLAS. The first success holds for the process; later calls change nothing. Matmul refuses to run before it.
Status LoadBlas(const char* blas_path);
bool blas_is_loaded();
bool blas_is_openblas();

// The open library; empty before LoadBlas.
struct BlasLibrary {
  std::string path;
  std::string config;  // the library's description of itself, with the processor that it detected
};
BlasLibrary blas_library();

void Gemm(const Product& product, float alpha, float beta);
void Gemm(const Product& product, double alpha, double beta);
void Gemm(const Product& product, Complex64 alpha, Complex64 beta);
void Gemm(const Product& product, Complex128 alpha, Complex128 beta);

}  // namespace jaxmp::hostmp
