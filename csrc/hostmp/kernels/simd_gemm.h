// Matrix products in which every element is summed in one order: K block by K block (k_blocks.h), and within a K block
// in ascending k, by one fused multiply-add (without such an instruction: a product and a sum) for each k. So its bits
// depend on a row of op(A) and a column of op(B) alone: not on m, n, the element's place, or where k is cut. No BLAS
// promises that: it takes other kernels for other shapes.
#pragma once

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

enum class SimdLevel { kPortable, kNeon, kAvx2, kAvx512 };
bool Has(SimdLevel level);  // this processor
SimdLevel simd_level();     // the highest that it has

// c = alpha op(a) op(b), or c += alpha op(a) op(b), K block by K block, where `adds`; c has the accumulator's type.
// `scratch` has SimdGemmScratch() bytes, aligned to 64.
void SimdGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds,
              char* scratch);
int64_t SimdGemmScratch(SimdLevel level, abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);

// The same of real numbers, with op(A) = A and at most kSmallN columns, to the bit: A is read where it lies. Nothing is
// faster then.
constexpr int64_t kSmallN = 16;
void SimdSmallNGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds);

// c += a op(b), of a few columns and floats, `a` of `type` f32, s8, u8 or float8: each element in ascending k from what
// c holds.
void SimdAddColumns(SimdLevel level, abi::cudaDataType_t type, const Product& product);

}  // namespace jaxmp::hostmp
