// Matrix products of integers of 8 bits, signed or not, summed in int32 modulo 2^32: exact in any order.
#pragma once

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// By which instructions.
enum class Int8Level { kPortable, kAvx2, kAvx512Vnni, kAmx };
Int8Level int8_level();  // the fastest one of this processor

// c = alpha op(a) op(b), or c += alpha op(a) op(b) where `adds`; c is int32. `scratch` has Int8GemmScratch() bytes,
// aligned to 64.
struct Int8Types {
  abi::cudaDataType_t a, b;
};
void Int8Gemm(Int8Level level, Int8Types types, const Product& product, int32_t alpha, bool adds, char* scratch);
int64_t Int8GemmScratch(Int8Level level, int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp
