// Which kernel multiplies which type: 16-bit numbers, and products with a fixed order of sums.
#ifndef JAXMP_HOSTMP_GEMM_GEMM_DISPATCH_H_
#define JAXMP_HOSTMP_GEMM_GEMM_DISPATCH_H_

#include <cstdint>
#include <string>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// Whether a product of real numbers whose sums may be in any order takes simd_gemm, which is then faster than the BLAS:
// few columns, and of f32 and f16 with AVX-512 any number of them, beside OpenBLAS (docs/benchmarks-avx512.md).
bool takes_simd_gemm(abi::cudaDataType_t type, abi::cublasOperation_t trans_a, int64_t n);

// 16-bit a and b into a float c. `scratch` has gemm16_scratch() bytes, aligned to 64.
void gemm16(abi::cudaDataType_t type, const KSegments& segments, float alpha, float beta, char* scratch);

// Enough for any product of at most m x n and k.
int64_t gemm16_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);

// c = op(a) op(b), or c += op(a) op(b), K block by K block, where `adds`; c has the accumulator's type. `scratch` has
// fixed_order_gemm_scratch() bytes, aligned to 64. bf16 is multiplied by the processor's own instructions where it has
// them, which sum blocks of k_unit() consecutive k at once: every K segment but the last one has a multiple of it.
void fixed_order_gemm(abi::cudaDataType_t type, const KSegments& segments, bool adds, char* scratch);
int64_t fixed_order_gemm_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);
int64_t k_unit(abi::cudaDataType_t type);
int64_t k_block_depth(abi::cudaDataType_t type);
bool has_bf16_kernel();  // whether the processor multiplies bf16 itself

// Which library and kernel serves which type, for people to read; empty before load_blas.
struct BlasInfo {
  std::string library, config, mkl;  // as BlasLibraries has them
  std::string f32, f64, c64, c128, bf16, f16;
};
BlasInfo blas_info();

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GEMM_GEMM_DISPATCH_H_
