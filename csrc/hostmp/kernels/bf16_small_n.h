// Products of bfloat16 with a few columns, where packing op(A) takes longer than multiplying it.
#ifndef JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_
#define JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// Whose sums these are, to the bit: which kernel takes the products of more columns.
enum class Bf16Sums { kAmx, kAvx512Bf16 };

// Computes c = alpha op(A) op(B) + beta c, without memory of its own, where op(A) = A, with at most 4 columns, alpha is
// 1, and beta 0 or 1. Returns whether these hold. K blocks, and where K segments may end, are those of the kernel.
bool bf16_small_n_gemm(Bf16Sums sums, const KSegments& segments, float alpha, float beta);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_
