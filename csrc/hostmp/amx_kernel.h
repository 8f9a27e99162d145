// A matrix product of bf16 numbers on AMX, Intel's matrix unit (Sapphire Rapids and later).
#ifndef JAXMP_HOSTMP_AMX_KERNEL_H_
#define JAXMP_HOSTMP_AMX_KERNEL_H_

#include <cstdint>

#include "csrc/hostmp/blas.h"

namespace jaxmp::hostmp {

// As gemm16 for bf16. Only where cpu().amx_bf16. The instruction takes subnormal inputs and results as 0.
void amx_gemm(const Product& product, float alpha, float beta, char* scratch);
int64_t amx_gemm_scratch(int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_AMX_KERNEL_H_
