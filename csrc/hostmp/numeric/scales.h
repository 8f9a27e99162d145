// The scales of low-precision operands in cuBLASLt's layout (cuBLAS documentation, "Narrow Precision Data Types
// Usage").
//
// `inner` counts along k in A and B, and along the rows of D; `outer` along the other dimension. Both are local to a
// rank, because its scales describe its part.
#pragma once

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/dtypes.h"
#include "csrc/hostmp/numeric/low_precision.h"

namespace jaxmp::hostmp {

using ScaleMode = abi::cublasMpMatmulMatrixScale_t;

// By mode: its name, and the number of elements along the inner dimension that share a scale (0: all of them).
struct ScaleModeFacts {
  const char* name;
  int64_t block;
};
inline constexpr ScaleModeFacts kScaleModes[] = {{"SCALAR_FP32", 0},    {"VEC16_UE4M3", 16},  {"VEC32_UE8M0", 32},
                                                 {"OUTER_VEC_FP32", 0}, {"VEC128_FP32", 128}, {"BLK128x128_FP32", 128}};
constexpr const char* NameOf(ScaleMode mode) { return kScaleModes[mode].name; }
constexpr int64_t BlockOf(ScaleMode mode) { return kScaleModes[mode].block; }

// Blocks of 16 or 32 elements: an element times its scale is exact in bf16.
constexpr bool IsTiled(ScaleMode mode) { return BlockOf(mode) == 16 || BlockOf(mode) == 32; }
// Blocks of 128, and whole rows: their scales apply to sums.
constexpr bool ScalesSums(ScaleMode mode) {
  return BlockOf(mode) == 128 || mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32;
}

// The position of the scale of inner block `inner` and outer index `outer`. Scales are stored in tiles of 128 outer x 4
// inner scales; `inners` is the number of inner blocks.
constexpr int64_t TiledOffset(int64_t inner, int64_t outer, int64_t inners) {
  const int64_t tile = inner / 4 * 4 * 128 + outer / 128 * 128 * RoundUp(inners, 4);
  return tile + outer % 32 * 16 + outer % 128 / 32 * 4 + inner % 4;
}

// A matrix's scales; null data means a scale of 1.
struct Scales {
  ScaleMode mode = abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
  const void* data = nullptr;

  float scalar() const { return data ? *static_cast<const float*>(data) : 1.0f; }
  // The scale of a block, in a tiled mode.
  float OfBlock(int64_t inner, int64_t outer, int64_t inners) const {
    const uint8_t bits = static_cast<const uint8_t*>(data)[TiledOffset(inner, outer, inners)];
    return mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? Ue8m0(bits) : Ue4m3(bits);
  }
  // The scales from an outer index on; null if the mode has no scale for each outer index.
  const float* of_outer(int64_t outer) const {
    return mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32 ? static_cast<const float*>(data) + outer : nullptr;
  }
  // The scale of a sum: VEC128 is outer-major, BLK128x128 inner-major in columns of a multiple of 4.
  float OfSum(int64_t inner, int64_t outer, int64_t inners, int64_t outers) const {
    const float* const values = static_cast<const float*>(data);
    if (mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32) return values[outer];
    if (mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32) return values[inner * outers + outer];
    return values[outer / 128 * RoundUp(inners, 4) + inner];
  }
};

// Turns a column of int32 sums into floats, each times `scale` and its entry of `scales` (unless `scales` is null). The
// products are taken in double, where they stay in range, and rounded once.
void ScaleIntegers(float* z, const float* scales, double scale, int64_t count);

// Multiplies a tile of D, in floats, by `scale` and encodes it in 8 or 4 bits. With a tiled `mode`, each block of a
// column is divided by a scale of its own, which is written to `scales`. `row` and `col`: the tile's position in the
// rank's part, which has `rows_of_part` rows. Returns the largest absolute value before all scaling, as the bits of a
// float (a NaN is larger than any number).
struct Downconversion {
  abi::cudaDataType_t type;
  const float* z;
  int64_t ldz, rows, cols;
  char* d;  // the tile's first element
  int64_t ldd;
  float scale;
  ScaleMode mode;
  uint8_t* scales;
  int64_t row, col, rows_of_part;
};
uint32_t DownconvertTile(const Downconversion& output);

}  // namespace jaxmp::hostmp
