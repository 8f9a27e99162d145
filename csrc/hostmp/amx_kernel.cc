// k and the columns are cut into panels; a panel of op(A) is packed in strips of 32 rows by pairs, one of op(B) in
// strips of 16 columns by indices (bf16_pack.h). A tile register holds 16 lines of 64 bytes, and the instruction
// multiplies 16 lines of one with 16 of another. C is column-major, so a line of sums is a column of C: columns of
// op(B) are the instruction's rows. Two by two tiles of sums, two strips of each operand fill the eight registers.
//
// Each sum runs over k in ascending order, alone in its lane, whatever the extents.
#include "csrc/hostmp/amx_kernel.h"

#include <algorithm>

#include "csrc/hostmp/bf16_pack.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace jaxmp::hostmp {
namespace {

#define JAXMP_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

constexpr int64_t kStrip = 2 * kBlock;
constexpr int64_t kDepth = 1024;            // deep enough for loading and storing the sums to matter little
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

// to = from + the product of two strips of `blocks` blocks, 32 x 32 floats; a null `from` is zero.
JAXMP_AMX void add_strips(const uint32_t* a, const uint32_t* b, int64_t blocks, const float* from, int64_t ld_from,
                          float* to, int64_t ld_to) {
  const auto stride_from = static_cast<size_t>(4 * ld_from), stride_to = static_cast<size_t>(4 * ld_to);
  if (from) {
    _tile_loadd(0, from, stride_from);
    _tile_loadd(1, from + kBlock, stride_from);
    _tile_loadd(2, from + kBlock * ld_from, stride_from);
    _tile_loadd(3, from + kBlock * ld_from + kBlock, stride_from);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
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
  _tile_stored(0, to, stride_to);
  _tile_stored(1, to + kBlock, stride_to);
  _tile_stored(2, to + kBlock * ld_to, stride_to);
  _tile_stored(3, to + kBlock * ld_to + kBlock, stride_to);
}

// Where the sums of a 32 x 32 tile go.
struct Target {
  float* c;
  int64_t ldc, rows, cols;
};

// c = alpha (strips) + beta c. Where alpha is 1, and beta 0 or 1, the sums start from c itself.
JAXMP_AMX void strip_product(const uint32_t* a, const uint32_t* b, int64_t blocks, const Target& t, float alpha,
                             float beta) {
  const bool continues = alpha == 1 && beta == 1, is_plain = alpha == 1 && (beta == 0 || beta == 1);
  if (is_plain && t.rows == kStrip && t.cols == kStrip) {
    return add_strips(a, b, blocks, continues ? t.c : nullptr, t.ldc, t.c, t.ldc);
  }
  alignas(64) float sums[kStrip * kStrip];
  if (continues) {
    for (int64_t col = 0; col < t.cols; ++col) std::copy_n(t.c + col * t.ldc, t.rows, sums + col * kStrip);
  }
  add_strips(a, b, blocks, continues ? sums : nullptr, kStrip, sums, kStrip);
  for (int64_t col = 0; col < t.cols; ++col) {
    float* const c = t.c + col * t.ldc;
    const float* const sum = sums + col * kStrip;
    if (is_plain) {
      std::copy_n(sum, t.rows, c);
    } else {
      for (int64_t row = 0; row < t.rows; ++row) c[row] = alpha * sum[row] + (beta == 0 ? 0 : beta * c[row]);
    }
  }
}

// Of 32 rows or columns, padded in k.
int64_t words_of_strip(int64_t k) { return 2 * kWordsOfBlock * ceil_div(std::min(k, kDepth), kStrip); }

int64_t strips_of_panel(int64_t m) { return ceil_div(std::min(m, kPanelRows), kStrip); }

// Rows [top, top + rows) of op(A) and `depth` k from `at` on, in strips one after another. Where rows are adjacent
// every block of k is read along all strips: long runs, for a large leading dimension puts each k on a page of its own.
void pack_panel(const Product& p, int64_t top, int64_t rows, int64_t at, int64_t depth, uint32_t* to) {
  const int64_t pairs = ceil_div(depth, kStrip) * kBlock;
  const int64_t step = p.trans_a == abi::CUBLAS_OP_N ? kBlock : pairs;
  for (int64_t pair = 0; pair < pairs; pair += step) {
    const Panel panel = panel_of_a(p, at + 2 * pair);
    for (int64_t row = 0; row < rows; row += kStrip) {
      pack_by_pairs(panel, top + row, rows - row, kStrip, depth - 2 * pair, step, to + row * pairs + pair * kStrip);
    }
  }
}

}  // namespace

JAXMP_AMX void amx_gemm(const Product& p, float alpha, float beta, char* scratch) {
  uint32_t* const packed_a = reinterpret_cast<uint32_t*>(scratch);
  uint32_t* const packed_b = packed_a + strips_of_panel(p.m) * words_of_strip(p.k);
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t at = 0; at < p.k; at += kDepth) {
    const int64_t depth = std::min(kDepth, p.k - at), blocks = ceil_div(depth, kStrip);
    const Panel b = panel_of_b(p, at);
    const auto strip_b = [&](int64_t col) { return packed_b + col / kBlock * blocks * kWordsOfBlock; };
    for (int64_t left = 0; left < p.n; left += kWidth) {
      const int64_t cols = std::min(kWidth, p.n - left);
      for (int64_t col = 0; col < round_up(cols, kStrip); col += kBlock) {
        pack_by_indices(b, left + col, cols - col, depth, strip_b(col));
      }
      for (int64_t top = 0; top < p.m; top += kPanelRows) {
        const int64_t rows = std::min(kPanelRows, p.m - top);
        pack_panel(p, top, rows, at, depth, packed_a);
        for (int64_t row = 0; row < rows; row += kStrip) {
          for (int64_t col = 0; col < cols; col += kStrip) {
            const Target target = {static_cast<float*>(p.c) + (left + col) * p.ldc + top + row, p.ldc,
                                   std::min(kStrip, rows - row), std::min(kStrip, cols - col)};
            strip_product(packed_a + row * blocks * kBlock, strip_b(col), blocks, target, alpha, at == 0 ? beta : 1.0f);
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

void amx_gemm(const Product&, float, float, char*) {}
int64_t amx_gemm_scratch(int64_t, int64_t, int64_t) { return 0; }

}  // namespace jaxmp::hostmp

#endif
