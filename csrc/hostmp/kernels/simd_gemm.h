// Matrix products in which every element is summed in one order: panel by panel (panels.h), and within a panel in
// ascending k, by one fused multiply-add (without such an instruction: a product and a sum) for each k. So its bits
// depend on a row of op(A) and a column of op(B) alone: not on m, n, the element's place, or where k is cut. No BLAS
// promises that: it takes other kernels for other shapes.
#ifndef JAXMP_HOSTMP_KERNELS_SIMD_GEMM_H_
#define JAXMP_HOSTMP_KERNELS_SIMD_GEMM_H_

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// Whether thin_gemm serves a product: float or double, op(A) = A, a few columns, and a processor with vectors.
bool is_thin(abi::cudaDataType_t type, const Product& product);

// c = a op(b), or c += a op(b) where `adds`, summed in the same order. It reads A where it lies, and is the fastest
// such product there is, for a BLAS packs A first.
void thin_gemm(abi::cudaDataType_t type, const Product& product, bool adds);

// ordered_gemm on an instruction set by name ("avx512", "avx2" or "portable", and no special one for bf16). False where
// this processor does not have it.
bool ordered_gemm_on(const char* instructions, abi::cudaDataType_t type, const Parts& parts, bool adds, char* scratch);
int64_t ordered_gemm_on_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_SIMD_GEMM_H_
