// The scales of low-precision operands as cuBLASLt lays them out (cuBLAS documentation, "Narrow Precision Data Types
// Usage").
//
// `inner` counts along k in A and B, and along the rows of D; `outer` along the other dimension. Both are local to a
// rank: its scales describe its part.
#ifndef JAXMP_HOSTMP_NUMERIC_SCALES_H_
#define JAXMP_HOSTMP_NUMERIC_SCALES_H_

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/dtypes.h"
#include "csrc/hostmp/numeric/low_precision.h"

namespace jaxmp::hostmp {

using ScaleMode = abi::cublasMpMatmulMatrixScale_t;

constexpr const char* NameOf(ScaleMode mode) {
  switch (mode) {
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32:
      return "SCALAR_FP32";
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3:
      return "VEC16_UE4M3";
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0:
      return "VEC32_UE8M0";
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32:
      return "OUTER_VEC_FP32";
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32:
      return "VEC128_FP32";
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32:
      return "BLK128x128_FP32";
  }
  return "unknown";
}

// How many elements along the inner dimension share a scale; 0 where all of them do.
constexpr int64_t BlockOf(ScaleMode mode) {
  switch (mode) {
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3:
      return 16;
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0:
      return 32;
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32:
    case abi::CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32:
      return 128;
    default:
      return 0;
  }
}

// 16- and 32-element blocks, whose scales are exact in bf16 together with what they scale.
constexpr bool IsTiled(ScaleMode mode) { return BlockOf(mode) == 16 || BlockOf(mode) == 32; }
// Blocks of 128, and whole rows: applied to sums.
constexpr bool ScalesSums(ScaleMode mode) {
  return BlockOf(mode) == 128 || mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32;
}

// Where the scale of inner block `inner` and outer index `outer` is: in tiles of 128 outer x 4 inner scales, `inners`
// being the number of inner blocks.
constexpr int64_t TiledOffset(int64_t inner, int64_t outer, int64_t inners) {
  const int64_t tile = inner / 4 * 4 * 128 + outer / 128 * 128 * RoundUp(inners, 4);
  return tile + outer % 32 * 16 + outer % 128 / 32 * 4 + inner % 4;
}

// A matrix's scales; null data is a scale of 1.
struct Scales {
  ScaleMode mode = abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
  const void* data = nullptr;

  float scalar() const { return data ? *static_cast<const float*>(data) : 1.0f; }
  // Of a tiled mode.
  float OfBlock(int64_t inner, int64_t outer, int64_t inners) const {
    const uint8_t bits = static_cast<const uint8_t*>(data)[TiledOffset(inner, outer, inners)];
    return mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? Ue8m0(bits) : Ue4m3(bits);
  }
  // Of a mode that scales sums: VEC128 is outer-major, BLK128x128 inner-major in columns of a multiple of 4.
  float OfSum(int64_t inner, int64_t outer, int64_t inners, int64_t outers) const {
    const float* const values = static_cast<const float*>(data);
    if (mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32) return values[outer];
    if (mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32) return values[inner * outers + outer];
    return values[outer / 128 * RoundUp(inners, 4) + inner];
  }
};

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_NUMERIC_SCALES_H_
