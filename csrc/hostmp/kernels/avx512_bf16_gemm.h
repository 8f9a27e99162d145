// A matrix product of bf16 numbers on AVX512_BF16: no BLAS on PyPI has one that AMD's processors may use.
#ifndef JAXMP_HOSTMP_KERNELS_AVX512_BF16_GEMM_H_
#define JAXMP_HOSTMP_KERNELS_AVX512_BF16_GEMM_H_

#include <cstdint>

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

constexpr int64_t kBf16Unit = 2;  // k that the instruction sums at once

// c = alpha op(a) op(b) + beta c; every K segment but the last one has a multiple of kBf16Unit k. Only where
// cpu().avx512_bf16. The instruction takes subnormal inputs and results as 0.
void Avx512Bf16Gemm(const KSegments& segments, float alpha, float beta, char* scratch);
int64_t Avx512Bf16GemmScratch(int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_AVX512_BF16_GEMM_H_
