// Matrix products of int8, summed in int32 modulo 2^32: exact in any order.
#pragma once

#include <cstdint>

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// The instructions that multiply.
enum class Int8Level { kPortable, kNeonDotprod, kAvx2, kAvxVnni, kAvx512Vnni, kAmx };
bool Has(Int8Level level);  // true if this processor has it
Int8Level int8_level();     // the highest that this processor has

// c = alpha op(a) op(b), or c += alpha op(a) op(b) if `adds`; c is int32. `scratch` has Int8GemmScratch() bytes,
// aligned to 64.
void Int8Gemm(Int8Level level, const Product& product, int32_t alpha, bool adds, char* scratch);
int64_t Int8GemmScratch(Int8Level level, int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp
