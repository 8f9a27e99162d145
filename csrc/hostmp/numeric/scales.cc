#include "csrc/hostmp/numeric/scales.h"

#include <algorithm>
#include <cstring>

#include "csrc/hostmp/cpu/dispatch.h"

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kRowsAtOnce = 512;  // a multiple of every block

// Divides a block by its scale, and stores the scale (cuBLAS documentation, "1D Block Quantization").
void ScaleBlock(const Downconversion& out, float* values, int64_t count, int64_t row, int64_t col) {
  uint32_t most = 0;  // as bits, where a NaN is the largest: e2m1 has none, so the scale has to keep it
  for (int64_t i = 0; i < count; ++i) most = std::max(most, AbsoluteBits(values[i]));
  const float wanted = FloatOf(most) / Largest(out.type);
  const int64_t block = BlockOf(out.mode);
  uint8_t bits = 0;
  if (out.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0) {
    // A small block is raised into a range without subnormal quotients, because threads of XLA take them for 0.
    const float value = FloatOf(most);
    bits = value < 0x1p-64f ? std::max(Ue8m0Above(value * 0x1p64f / Largest(out.type)) - 64, 0) : Ue8m0Above(wanted);
  } else {
    Encode(abi::CUDA_R_8F_E4M3, &wanted, 1, &bits);
  }
  out.scales[TiledOffset(row / block, col, out.rows_of_part / block)] = bits;
  const float inverse = out.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? InverseUe8m0(bits)
                        : bits == 0 ? 0.0f
                                    : 1.0f / Ue4m3(bits);  // rounded to 0: the block is all but 0
  for (int64_t i = 0; i < count; ++i) values[i] *= inverse;
}

JAXMP_DISPATCH(
    ScaleRun, (float* z, const float* __restrict scales, double scale, int64_t count), (z, scales, scale, count),
    for (int64_t i = 0; i < count; ++i) {
      int32_t sum;
      std::memcpy(&sum, z + i, sizeof(sum));
      z[i] = static_cast<float>(sum * (scales ? scales[i] * scale : scale));
    })

}  // namespace

void ScaleIntegers(float* z, const float* scales, double scale, int64_t count) {
  ScaleRunBest(z, scales, scale, count);
}

uint32_t DownconvertTile(const Downconversion& out) {
  alignas(64) float values[kRowsAtOnce];
  uint32_t most = 0;
  const int64_t block = BlockOf(out.mode);
  for (int64_t col = 0; col < out.cols; ++col) {
    for (int64_t row = 0; row < out.rows; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, out.rows - row);
      const float* const z = out.z + col * out.ldz + row;
      for (int64_t i = 0; i < count; ++i) most = std::max(most, AbsoluteBits(z[i]));
      for (int64_t i = 0; i < count; ++i) values[i] = out.scale * z[i];
      for (int64_t i = 0; block > 0 && i < count; i += block) {
        ScaleBlock(out, values + i, block, out.row + row + i, out.col + col);
      }
      Encode(out.type, values, count, out.d + BytesOf(out.type, col * out.ldd + row));
    }
  }
  return most;
}

}  // namespace jaxmp::hostmp
