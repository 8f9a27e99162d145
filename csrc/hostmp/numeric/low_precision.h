// Numbers of 8 bits and fewer: what their bits mean, and how a float becomes one.
//
// E4M3 has no infinity and one NaN (S.1111.111), E5M2 is the upper half of f16, E2M1 has neither (OCP 8-bit Floating
// Point Specification 1.0, table 1; OCP Microscaling Formats 1.0, tables 2 to 7). The other formats are those of
// ml_dtypes: E4M3 and E3M4 as IEEE 754 has them, and FNUZ ones, where the code of -0 is the only NaN. Two numbers of 4
// bits share a byte, the first one in its low half.
#pragma once

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// `count` adjacent numbers, from number `first` of `from` on, times `scale`. A number itself, and its product with a
// power of two (MX) or with an E4M3 number (NVFP4), is exact in bf16 as long as it is in bf16's normal range; what is
// finer is cut off. Floats hold all of it.
void Decode(abi::cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, BFloat16* to);
void Decode(abi::cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, float* to);

// Integers of 4 bits, and of E2M1 twice the number, as bytes.
void Unpack(abi::cudaDataType_t type, const void* from, int64_t first, int64_t count, int8_t* to);

// To nearest, ties to even, and beyond the largest number to that number, infinities too: what CUDA calls SATFINITE
// (cuda_fp8.h, __nv_cvt_float_to_fp8). A NaN stays one; E2M1 has none and takes its largest number.
void Encode(abi::cudaDataType_t type, const float* from, int64_t count, void* to);

float Largest(abi::cudaDataType_t type);

// The bits of |value|; a larger number, and a NaN, has larger ones.
inline uint32_t AbsoluteBits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffu;
}

// A scale of one byte.
inline float Ue8m0(uint8_t bits) {
  // 2^(bits - 127); 0 is subnormal as a float, and 255 is NaN.
  const uint32_t word = bits == 255 ? 0x7fc00000u : bits == 0 ? 0x00400000u : uint32_t{bits} << 23;
  float value;
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}
// 2^(127 - bits), for what ue8m0_above gives for finite numbers.
inline float InverseUe8m0(uint8_t bits) { return bits > 253 ? 0.0f : Ue8m0(static_cast<uint8_t>(254 - bits)); }
float Ue4m3(uint8_t bits);  // the sign is ignored

// The power of two that follows a block's largest absolute value divided by the largest number of its type
// (cuBLAS documentation, "1D Block Quantization").
uint8_t Ue8m0Above(float scale);

}  // namespace jaxmp::hostmp
