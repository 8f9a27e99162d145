// Products of bfloat16 with a few columns, where packing op(A) takes longer than multiplying it.
#ifndef JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_
#define JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// The kernel that takes products of more columns; these sums have its bits.
enum class Bf16Sums { kAmx, kAvx512Bf16 };

constexpr int64_t kBf16SmallN = 4;

// c = A op(B), or c += A op(B) where `adds`, of at most kBf16SmallN columns; it takes no scratch. K is cut into the
// same blocks and segments as by the kernel for many columns.
void Bf16SmallNGemm(Bf16Sums sums, const KSegments& segments, bool adds);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_BF16_SMALL_N_H_
