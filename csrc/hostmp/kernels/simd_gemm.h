// Matrix products that sum every element in one order: K block by K block (k_blocks.h), and within a K block in
// ascending k, by one fused multiply-add (without such an instruction: a product and a sum) for each k. The bits of an
// element depend only on a row of op(A) and a column of op(B): not on m, n, the element's position, or where k is cut.
// No BLAS promises this, because it takes other kernels for other shapes.
#pragma once

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

enum class SimdLevel { kPortable, kNeon, kAvx2, kAvx512 };
bool Has(SimdLevel level);  // true if this processor has it
SimdLevel simd_level();     // the highest that this processor has

// c = alpha op(a) op(b), or c += alpha op(a) op(b), K block by K block, if `adds`; c has the accumulator's type.
// `scratch` has SimdGemmScratch() bytes, aligned to 64.
void SimdGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds,
              char* scratch);
int64_t SimdGemmScratch(SimdLevel level, abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);

// The same, to the bit, for real numbers, op(A) = A and at most kSmallN columns: A is read in place. No other kernel is
// faster then.
constexpr int64_t kSmallN = 16;
void SimdSmallNGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds);

// c += a op(b), for a few columns, in floats; `a` is of `type` f32, s8, u8 or float8. Each element is summed in
// ascending k, starting from c.
void SimdAddColumns(SimdLevel level, abi::cudaDataType_t type, const Product& product);

}  // namespace jaxmp::hostmp
