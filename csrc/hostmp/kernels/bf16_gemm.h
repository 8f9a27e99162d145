// Matrix products of bfloat16 by instructions for bfloat16, which treat subnormal inputs and results as 0.
#pragma once

#include <cstdint>

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// k of a K block. AMX's instruction adds the sum of 32 products at a time, so 1024 make 32 terms. Adding a block's sums
// to C, which no instruction does from a tile register, costs a third of the rate at 256 and almost nothing at 1024.
constexpr int64_t kAmxKC = 1024;
constexpr int64_t kAmxUnit = 32, kBf16Unit = 2;  // k that one instruction sums

// The kernel that would multiply more columns; sums of few columns have its bits.
enum class Bf16Sums { kAmx, kAvx512Bf16 };
constexpr int64_t kBf16SmallN = 4;

#if defined(__x86_64__)

// c = alpha op(a) op(b) + beta c; every K segment but the last has a multiple of the unit k. AMX is Intel's matrix unit
// (Sapphire Rapids and later). No BLAS on PyPI has an AVX512_BF16 kernel that AMD's processors may use. Called only if
// cpu() has the instructions.
void AmxGemm(const KSegments& segments, float alpha, float beta, char* scratch);
int64_t AmxGemmScratch(int64_t m, int64_t n, int64_t k);
void Avx512Bf16Gemm(const KSegments& segments, float alpha, float beta, char* scratch);
int64_t Avx512Bf16GemmScratch(int64_t m, int64_t n, int64_t k);

// c = A op(B), or c += A op(B) if `adds`, for at most kBf16SmallN columns, because packing op(A) would take longer than
// multiplying it. It takes no scratch. K is cut into the same blocks and segments as by the kernel for many columns.
void Bf16SmallNGemm(Bf16Sums sums, const KSegments& segments, bool adds);

#else

inline void AmxGemm(const KSegments&, float, float, char*) {}
inline int64_t AmxGemmScratch(int64_t, int64_t, int64_t) { return 0; }
inline void Avx512Bf16Gemm(const KSegments&, float, float, char*) {}
inline int64_t Avx512Bf16GemmScratch(int64_t, int64_t, int64_t) { return 0; }
inline void Bf16SmallNGemm(Bf16Sums, const KSegments&, bool) {}

#endif

}  // namespace jaxmp::hostmp
