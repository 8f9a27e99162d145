#include "csrc/hostmp/numeric/downconvert.h"

#include <algorithm>

#include "csrc/hostmp/cpu/dispatch.h"

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kRowsAtOnce = 512;  // a multiple of every block

// Divides a block by its scale, and stores the scale (cuBLAS documentation, "1D Block Quantization").
void scale_block(const Downconversion& out, float* values, int64_t count, int64_t row, int64_t col) {
  uint32_t most = 0;  // as bits, by which a NaN is the largest: e2m1 has none, so the scale has to keep it
  for (int64_t i = 0; i < count; ++i) most = std::max(most, absolute_bits(values[i]));
  const float wanted = float_of(most) / largest(out.type);
  const int64_t block = block_of(out.mode);
  uint8_t bits = 0;
  if (out.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0) {
    // Of a small block, in a range where no quotient is subnormal: threads of XLA take such numbers for 0.
    const float value = float_of(most);
    bits = value < 0x1p-64f ? std::max(ue8m0_above(value * 0x1p64f / largest(out.type)) - 64, 0) : ue8m0_above(wanted);
  } else {
    encode(abi::CUDA_R_8F_E4M3, &wanted, 1, &bits);
  }
  out.scales[tiled_offset(row / block, col, out.rows_of_part / block)] = bits;
  const float inverse = out.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? inverse_ue8m0(bits)
                        : bits == 0 ? 0.0f
                                    : 1.0f / ue4m3(bits);  // rounded to 0: the block is all but 0
  for (int64_t i = 0; i < count; ++i) values[i] *= inverse;
}

}  // namespace

uint32_t downconvert_tile(const Downconversion& out) {
  alignas(64) float values[kRowsAtOnce];
  uint32_t most = 0;
  const int64_t block = block_of(out.mode);
  for (int64_t col = 0; col < out.cols; ++col) {
    for (int64_t row = 0; row < out.rows; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, out.rows - row);
      const float* const z = out.z + col * out.ldz + row;
      for (int64_t i = 0; i < count; ++i) most = std::max(most, absolute_bits(z[i]));
      for (int64_t i = 0; i < count; ++i) values[i] = out.scale * z[i];
      for (int64_t i = 0; block > 0 && i < count; i += block) {
        scale_block(out, values + i, block, out.row + row + i, out.col + col);
      }
      encode(out.type, values, count, out.d + bytes_of(out.type, col * out.ldd + row));
    }
  }
  return most;
}

}  // namespace jaxmp::hostmp
