// Products of bfloat16 with a few columns, where packing op(A) takes longer than multiplying it.
#ifndef JAXMP_HOSTMP_BF16_THIN_H_
#define JAXMP_HOSTMP_BF16_THIN_H_

#include "csrc/hostmp/panels.h"

namespace jaxmp::hostmp {

// Which of our kernels takes the products of more columns; these have the same bits.
enum class Bf16Sums { kAmx, kAvx512Bf16 };

// op(A) = A, at most 4 columns.
bool is_bf16_thin(const Product& product);

// c (+)= op(A) op(B), where `is_bf16_thin`. Subnormal inputs and results are 0, as in the other kernels.
void bf16_thin_gemm(Bf16Sums sums, const Parts& parts, bool adds);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_BF16_THIN_H_
