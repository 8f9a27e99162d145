// k (panels.h) and the columns are cut into panels; a panel of op(A) is packed in strips of 32 rows by pairs, one of
// op(B) in strips of 16 columns by indices (bf16_pack.h). A tile register holds 16 lines of 64 bytes, and the
// instruction multiplies 16 lines of one with 16 of another. C is column-major, so a line of sums is a column of C:
// columns of op(B) are the instruction's rows. Two by two tiles of sums, two strips of each operand fill the eight
// registers.
//
// Each sum runs over a panel of k in ascending order, alone in its lane, whatever the extents.
#include "csrc/hostmp/kernels/amx_gemm.h"

#include <algorithm>

#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/kernels/pack_bf16.h"
#include "csrc/hostmp/kernels/bf16_small_n.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

#define JAXMP_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

constexpr int64_t kStrip = 2 * kBlock;
constexpr int64_t kWidth = 512;             // columns of op(B) packed at a time: 1 MiB, for the second cache
constexpr int64_t kPanelRows = 8 * kStrip;  // of op(A) packed at a time: 512 KiB
constexpr int64_t kWordsOfBlock = kBlock * kBlock;
constexpr int64_t kLine = 64;  // bytes of a tile's line

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_line[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// The product of two strips of `blocks` blocks, 32 x 32 floats.
JAXMP_AMX void multiply_strips(const uint32_t* a, const uint32_t* b, int64_t blocks, float* to, int64_t ld) {
  const auto stride = static_cast<size_t>(4 * ld);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint32_t* const b_right = b + blocks * kWordsOfBlock;
  for (int64_t i = 0; i < blocks; ++i) {
    _tile_loadd(4, a + i * 2 * kWordsOfBlock, 2 * kLine);
    _tile_loadd(6, b + i * kWordsOfBlock, kLine);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(5, a + i * 2 * kWordsOfBlock + kBlock, 2 * kLine);
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(7, b_right + i * kWordsOfBlock, kLine);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, to, stride);
  _tile_stored(1, to + kBlock, stride);
  _tile_stored(2, to + kBlock * ld, stride);
  _tile_stored(3, to + kBlock * ld + kBlock, stride);
}

// Where a tile of at most 32 x 32 sums goes.
struct Target {
  float* c;
  int64_t ldc, rows, cols;
  float alpha, beta;
};

// c = alpha sums + beta c.
JAXMP_AMX void put(const float* sums, const Target& t) {
  const __m512 alpha = _mm512_set1_ps(t.alpha), beta = _mm512_set1_ps(t.beta);
  for (int64_t row = 0; row < t.rows; row += kBlock) {
    const auto mask = static_cast<__mmask16>(0xffff >> std::max<int64_t>(0, row + kBlock - t.rows));
    for (int64_t col = 0; col < t.cols; ++col) {
      float* const c = t.c + col * t.ldc + row;
      __m512 value = _mm512_mul_ps(alpha, _mm512_load_ps(sums + col * kStrip + row));
      if (t.beta != 0) value = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(mask, c), value);
      _mm512_mask_storeu_ps(c, mask, value);
    }
  }
}

// Sums that stay as they are go straight to C; others, which no instruction adds from a tile register, through memory.
JAXMP_AMX void strip_product(const uint32_t* a, const uint32_t* b, int64_t blocks, const Target& t) {
  if (t.alpha == 1 && t.beta == 0 && t.rows == kStrip && t.cols == kStrip) {
    return multiply_strips(a, b, blocks, t.c, t.ldc);
  }
  alignas(64) float sums[kStrip * kStrip];
  multiply_strips(a, b, blocks, sums, kStrip);
  put(sums, t);
}

// Of 32 rows or columns, padded in k.
int64_t words_of_strip(int64_t k) { return 2 * kWordsOfBlock * ceil_div(std::min(k, kAmxPanel), kStrip); }

int64_t strips_of_panel(int64_t m) { return ceil_div(std::min(m, kPanelRows), kStrip); }

// Rows [top, top + rows) of a segment of op(A), in strips one after another, each of `pairs_of_strip` pairs. Where rows
// are adjacent every block of k is read along all strips: long runs, for a large leading dimension puts each k on a
// page of its own.
void pack_rows(const Segment& segment, int64_t top, int64_t rows, int64_t pairs_of_strip, uint32_t* to) {
  const int64_t step = segment.part->trans_a == abi::CUBLAS_OP_N ? kStrip : round_up(segment.depth, kStrip);
  for (int64_t at = 0; at < segment.depth; at += step) {
    const Panel panel = panel_of_a({segment.part, segment.k + at, segment.offset + at, segment.depth - at});
    for (int64_t row = 0; row < rows; row += kStrip) {
      pack_by_pairs(panel, top + row, rows - row, kStrip, segment.depth - at, step / 2,
                    to + row * pairs_of_strip + (segment.offset + at) / 2 * kStrip);
    }
  }
}

}  // namespace

JAXMP_AMX void amx_gemm(const Parts& parts, float alpha, float beta, char* scratch) {
  if (bf16_thin_gemm(Bf16Sums::kAmx, parts, alpha, beta)) return;
  const Product& p = parts.front();
  const std::vector<KPanel> panels = panels_of(parts, kAmxPanel);
  uint32_t* const packed_a = reinterpret_cast<uint32_t*>(scratch);
  uint32_t* const packed_b = packed_a + strips_of_panel(p.m) * words_of_strip(panels.front().depth);
  const TileConfig config;
  _tile_loadconfig(&config);
  for (const KPanel& panel : panels) {
    const int64_t blocks = ceil_div(panel.depth, kStrip);
    const float beta_of_panel = panel.begin == 0 ? beta : 1.0f;
    const auto strip_b = [&](int64_t col) { return packed_b + col / kBlock * blocks * kWordsOfBlock; };
    for (int64_t left = 0; left < p.n; left += kWidth) {
      const int64_t cols = std::min(kWidth, p.n - left);
      for (int64_t col = 0; col < round_up(cols, kStrip); col += kBlock) {
        for (const Segment& segment : panel.segments) {
          pack_by_indices(panel_of_b(segment), left + col, cols - col, segment.depth,
                          strip_b(col) + segment.offset / kStrip * kWordsOfBlock);
        }
      }
      for (int64_t top = 0; top < p.m; top += kPanelRows) {
        const int64_t rows = std::min(kPanelRows, p.m - top);
        for (const Segment& segment : panel.segments) pack_rows(segment, top, rows, blocks * kBlock, packed_a);
        for (int64_t row = 0; row < rows; row += kStrip) {
          for (int64_t col = 0; col < cols; col += kStrip) {
            const Target target = {static_cast<float*>(p.c) + (left + col) * p.ldc + top + row,
                                   p.ldc,
                                   std::min(kStrip, rows - row),
                                   std::min(kStrip, cols - col),
                                   alpha,
                                   beta_of_panel};
            strip_product(packed_a + row * blocks * kBlock, strip_b(col), blocks, target);
          }
        }
      }
    }
  }
  _tile_release();
}

int64_t amx_gemm_scratch(int64_t m, int64_t n, int64_t k) {
  return 4 * words_of_strip(k) * (strips_of_panel(m) + ceil_div(std::min(n, kWidth), kStrip));
}

}  // namespace jaxmp::hostmp

#else

namespace jaxmp::hostmp {

void amx_gemm(const Parts&, float, float, char*) {}
int64_t amx_gemm_scratch(int64_t, int64_t, int64_t) { return 0; }

}  // namespace jaxmp::hostmp

#endif
