// Numbers of 8 bits and fewer: the meaning of their bits, and the conversion of floats to them.
//
// E4M3 has no infinity and one NaN (S.1111.111), E5M2 is the upper half of f16, E2M1 has no infinity and no NaN (OCP
// 8-bit Floating Point Specification 1.0, table 1; OCP Microscaling Formats 1.0, tables 2 to 7). The other formats come
// from ml_dtypes: E4M3 and E3M4 as in IEEE 754, and FNUZ formats, where the code of -0 is the only NaN. Two 4-bit
// numbers share a byte, the first one in its low half.
#pragma once

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// Decodes `count` adjacent numbers, from number `first` of `from` on, times `scale`. A number, and its product with a
// power of two (MX) or with an E4M3 number (NVFP4), is exact in bf16 as long as it is in bf16's normal range; finer
// bits are cut off. Floats hold all of it.
void Decode(abi::cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, BFloat16* to);
void Decode(abi::cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, float* to);

// Unpacks 4-bit integers, and E2M1 numbers doubled, to bytes.
void Unpack(abi::cudaDataType_t type, const void* from, int64_t first, int64_t count, int8_t* to);

// Rounds to nearest, ties to even; values beyond the largest number, infinities too, become that number, as in CUDA's
// SATFINITE (cuda_fp8.h, __nv_cvt_float_to_fp8). A NaN stays a NaN; E2M1 has none and takes its largest number.
void Encode(abi::cudaDataType_t type, const float* from, int64_t count, void* to);

float Largest(abi::cudaDataType_t type);

// The bits of |value|. A larger value has larger bits, and a NaN has the largest.
inline uint32_t AbsoluteBits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffu;
}

// The value of a scale of one byte.
inline float Ue8m0(uint8_t bits) {
  // 2^(bits - 127); 0 is subnormal as a float, and 255 is NaN.
  const uint32_t word = bits == 255 ? 0x7fc00000u : bits == 0 ? 0x00400000u : uint32_t{bits} << 23;
  float value;
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}
// 2^(127 - bits), for bits that Ue8m0Above() gives for finite numbers.
inline float InverseUe8m0(uint8_t bits) { return bits > 253 ? 0.0f : Ue8m0(static_cast<uint8_t>(254 - bits)); }
float Ue4m3(uint8_t bits);  // the sign is ignored

// Rounds a block's scale up to a power of two and returns its bits. The scale is the block's largest absolute value
// divided by the largest number of its type (cuBLAS documentation, "1D Block Quantization").
uint8_t Ue8m0Above(float scale);

}  // namespace jaxmp::hostmp
