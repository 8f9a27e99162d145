// Single-precision products whose operands are rounded first: cuBLAS's CUBLAS_COMPUTE_32F_FAST_*.
//
// All of them round to nearest, ties to even; FAST_TF32 keeps ten bits of the mantissa ("input conversions round to
// nearest even", cuBLAS documentation of CUDA 13, cublasComputeType_t). What is beyond half precision's range becomes
// an infinity. Products are exact and summed in f32.
#ifndef JAXMP_HOSTMP_GEMM_ROUNDED_GEMM_H_
#define JAXMP_HOSTMP_GEMM_ROUNDED_GEMM_H_

#include <complex>
#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// Whether the compute type rounds f32 and c64 operands ahead of the product.
bool rounds_operands(abi::cublasComputeType_t compute);

// As gemm16, for operands of `type` f32 or c64 (whose parts are rounded one by one).
void rounded_gemm(abi::cublasComputeType_t compute, abi::cudaDataType_t type, const Product& product,
                  std::complex<float> alpha, float beta, char* scratch);
int64_t rounded_gemm_scratch(abi::cublasComputeType_t compute, abi::cudaDataType_t type, int64_t m, int64_t n,
                             int64_t k);

void round_to_tf32(const float* from, float* to, int64_t count);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GEMM_ROUNDED_GEMM_H_
