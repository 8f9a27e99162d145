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
#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// As Multiply(), of operands of f32 or c64 (whose parts are rounded one by one) and a choice that rounds them.
void rounded_gemm(const KernelChoice& choice, abi::cublasComputeType_t compute, const KSegments& segments,
                  std::complex<double> alpha, bool adds, char* scratch);
int64_t rounded_gemm_scratch(const KernelChoice& choice, int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GEMM_ROUNDED_GEMM_H_
