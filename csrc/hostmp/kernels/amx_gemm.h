// A matrix product of bf16 numbers on AMX, Intel's matrix unit (Sapphire Rapids and later).
#ifndef JAXMP_HOSTMP_KERNELS_AMX_GEMM_H_
#define JAXMP_HOSTMP_KERNELS_AMX_GEMM_H_

#include <cstdint>

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// k of a K block. The instruction adds the sum of 32 products at a time, so 1024 make 32 terms; and adding a block's
// sums to C, which no instruction does from a tile register, costs a third of the rate at 256, nothing to speak of at
// 1024.
constexpr int64_t kAmxKC = 1024;
constexpr int64_t kAmxUnit = 32;  // k that the instruction sums at once

// c = alpha op(a) op(b) + beta c; every K segment but the last one has a multiple of kAmxUnit k. Only where
// cpu().amx_bf16. The instruction takes subnormal inputs and results as 0.
void AmxGemm(const KSegments& segments, float alpha, float beta, char* scratch);
int64_t AmxGemmScratch(int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_AMX_GEMM_H_
