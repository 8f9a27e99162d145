// Products of bfloat16 with a few columns, where packing op(A) takes longer than multiplying it.
#ifndef JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_
#define JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// Whose sums these are, to the bit: which kernel takes the products of more columns.
enum class Bf16Sums { kAmx, kAvx512Bf16 };

constexpr int64_t kBf16SmallN = 4;

// c = A op(B), or c += A op(B) where `adds`, of at most kBf16SmallN columns; it takes no scratch. K blocks, and where K
// segments may end, are those of the kernel.
void bf16_small_n_gemm(Bf16Sums sums, const KSegments& segments, bool adds);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_
