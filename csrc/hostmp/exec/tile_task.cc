#include "csrc/hostmp/exec/tile_task.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/exec/tile_store.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/scaled_gemm.h"
#include "csrc/hostmp/handles/matrix_view.h"
#include "csrc/hostmp/tiling/workspace.h"

namespace jaxmp::hostmp {
namespace {

class TileTask {
 public:
  TileTask(const DistributedProduct& product, const Tile& tile, char* workspace)
      : product_(product),
        tile_(tile),
        m_(product.tiling().m[static_cast<size_t>(tile.m_range)]),
        n_(product.tiling().n[static_cast<size_t>(tile.n_range)]),
        call_(*product.calls[0]),
        kernel_(kernel_of(call_, tile.cols)),
        scratch_(workspace ? workspace + product.area().sums_bytes : nullptr),
        boundary_(scratch_ + product.area().scratch_bytes),
        gathered_(boundary_ + product.area().boundary_bytes),
        z_{workspace, tile.rows} {
    if (product.tiling().is_together_in_d(tile)) {
      const TileOrigin origin = origin_of(n_, tile.col);
      const bool is_in_d = sums_in_d(call_, product.tiling(), tile);
      if (is_in_d) z_ = locate(product.calls[static_cast<size_t>(origin.rank)]->d, origin.row, origin.col);
      stores_.emplace_back(product.calls, origin, tile.rows, tile.cols, z_, is_in_d, scratch_);
      return;
    }
    for (int32_t i = tile.n_range; i < tile.n_range + tile.n_ranges; ++i) {
      const CommonRange& n = n_range_at(i);
      char* const z = z_.data + bytes_of(call_.accumulator(), (n.begin - n_.begin) * z_.ld);
      stores_.emplace_back(product.calls, origin_of(n, 0), tile.rows, n.size, MatrixView{z, z_.ld}, false, scratch_);
    }
  }

  void operator()() {
    call_.scales_last() ? sum_then_scale() : sum();
    for (const TileStore& store : stores_) store.finish();
  }

 private:
  const CommonRange& n_range_at(int32_t i) const { return product_.tiling().n[static_cast<size_t>(i)]; }

  // Where D has the tile's first row, and column `col` of a range of n.
  TileOrigin origin_of(const CommonRange& n, int64_t col) const {
    const int64_t rank = call_.is_all_reduce ? 0 : rank_of(call_.grid(), m_.proc[0], n.proc[0]);
    return {rank, m_.local[0] + tile_.row, n.local[0] + col};
  }

  // z = beta C, and onto it the products, as fast as the kernel does them.
  void sum() {
    bool is_started = stores_.size() > 1;  // some of them may read C, and others not
    if (is_started) fill_zero();
    for (const TileStore& store : stores_) is_started = store.add_c(is_started);
    if (!product_.tiling().k.empty()) return multiply(is_started);
    if (!is_started) fill_zero();
  }

  // z = alpha (the sum over k in ascending order) + beta C.
  void sum_then_scale() {
    product_.tiling().k.empty() ? fill_zero() : multiply(false);
    const std::complex<double> alpha = call_.alpha * tensor_scale();
    if (alpha != 1.0) {
      scale_sums(z_.data, z_.ld, tile_.rows, tile_.cols, alpha.real(), alpha.imag(), call_.accumulator(),
                 call_.takes_scales());
    }
    for (const TileStore& store : stores_) store.add_c(true);
  }

  // Of A and B; the ranks agree on tensor-wide scales.
  double tensor_scale() const {
    double scale = 1;
    for (const Scales* scales : {&call_.scale_a, &call_.scale_b}) {
      if (scales->mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32) scale *= static_cast<double>(scales->scalar());
    }
    return scale;
  }

  // z = alpha op(A) op(B), onto z where `adds`.
  void multiply(bool adds) {
    const std::complex<double> alpha = call_.scales_last() ? 1.0 : call_.alpha;
    if (call_.is_decoded()) return multiply_decoded(alpha.real(), adds);
    const KSegments segments = call_.fixed_reduction_order ? segments_of_whole_units() : k_segments();
    Multiply(kernel_, segments, alpha, adds, scratch_);
  }

  void multiply_decoded(double alpha, bool adds) {
    std::vector<ScaledProduct> segments;
    for (const CommonRange& range : product_.tiling().k) segments.push_back(scaled_product_of(range));
    if (call_.fixed_reduction_order) return ScaledGemm(kernel_, segments, alpha, adds, scratch_);
    for (const ScaledProduct& segment : segments) {
      ScaledGemm(kernel_, {segment}, alpha, adds || &segment != segments.data(), scratch_);
    }
  }

  KSegments segments_of_whole_units() {
    const int64_t unit = KUnit(kernel_.kernel);
    KSegments segments;
    char* boundary = boundary_;
    int64_t at = 0;  // k that the segments cover so far
    for (const CommonRange& range : product_.tiling().k) {
      const int64_t end = range.begin + range.size;
      const int64_t whole = end == call_.k ? end : end / unit * unit;
      if (at < whole) segments.push_back(product_of(sub_range(range, at, whole)));
      at = std::max(at, whole);
      if (at >= end) continue;
      segments.push_back(boundary_segment(at, std::min(at + unit, call_.k), boundary));
      boundary += boundary_bytes(call_, segments.back().k, tile_.rows, tile_.cols);
      at += segments.back().k;
    }
    return segments;
  }

  static CommonRange sub_range(const CommonRange& range, int64_t begin, int64_t end) {
    const int64_t skipped = begin - range.begin;
    return {begin, end - begin, {range.proc[0], range.proc[1]}, {range.local[0] + skipped, range.local[1] + skipped}};
  }

  // The k unit around the end of a range of k, copied together: an instruction sums a whole unit. Only 16-bit types
  // need this.
  Product boundary_segment(int64_t begin, int64_t end, char* memory) {
    const int64_t size = end - begin;
    uint16_t* const a = reinterpret_cast<uint16_t*>(memory);
    uint16_t* const b = a + tile_.rows * size;
    for (const CommonRange& range : product_.tiling().k) {
      const int64_t from = std::max(begin, range.begin), to = std::min(end, range.begin + range.size);
      if (from >= to) continue;
      const Product p = product_of(sub_range(range, from, to));
      const bool is_a_plain = p.trans_a == abi::CUBLAS_OP_N, is_b_plain = p.trans_b == abi::CUBLAS_OP_N;
      for (int64_t k = 0; k < p.k; ++k) {
        for (int64_t row = 0; row < p.m; ++row) {
          a[(from - begin + k) * p.m + row] =
              static_cast<const uint16_t*>(p.a)[is_a_plain ? k * p.lda + row : row * p.lda + k];
        }
        for (int64_t col = 0; col < p.n; ++col) {
          b[col * size + from - begin + k] =
              static_cast<const uint16_t*>(p.b)[is_b_plain ? col * p.ldb + k : k * p.ldb + col];
        }
      }
    }
    return {abi::CUBLAS_OP_N, abi::CUBLAS_OP_N, tile_.rows, tile_.cols, size, a, tile_.rows, b, size, z_.data, z_.ld};
  }

  Product product_of(const CommonRange& k) const {
    const bool is_a_plain = call_.trans_a == abi::CUBLAS_OP_N;
    const MatrixView a =
        piece(&MatmulCall::a, is_a_plain, {m_.proc[1], m_.local[1] + tile_.row}, {k.proc[0], k.local[0]});
    const MatrixView b = product_.tiling().is_together_in_b(tile_) ? piece_of_b(k, n_, tile_.col) : gathered_b(k);
    return {call_.trans_a, call_.trans_b, tile_.rows, tile_.cols, k.size, a.data, a.ld, b.data, b.ld, z_.data, z_.ld};
  }

  MatrixView piece_of_b(const CommonRange& k, const CommonRange& n, int64_t col) const {
    return piece(&MatmulCall::b, call_.trans_b == abi::CUBLAS_OP_N, {k.proc[1], k.local[1]},
                 {n.proc[1], n.local[1] + col});
  }

  // The columns of all ranks, put together as they are stored.
  MatrixView gathered_b(const CommonRange& k) const {
    const abi::cudaDataType_t type = call_.b.desc.type;
    const bool is_plain = call_.trans_b == abi::CUBLAS_OP_N;
    const MatrixView all = {gathered_ + bytes_of(type, k.begin * tile_.cols), is_plain ? k.size : tile_.cols};
    for (int32_t i = tile_.n_range; i < tile_.n_range + tile_.n_ranges; ++i) {
      const CommonRange& n = n_range_at(i);
      const int64_t col = n.begin - n_.begin;
      const MatrixView from = piece_of_b(k, n, 0);
      char* const to = all.data + bytes_of(type, is_plain ? col * all.ld : col);
      copy_view(type, from, is_plain ? k.size : n.size, is_plain ? n.size : k.size, {to, all.ld});
    }
    return all;
  }

  KSegments k_segments() const {
    KSegments segments;
    for (const CommonRange& range : product_.tiling().k) segments.push_back(product_of(range));
    return segments;
  }

  // The operand's piece, with the scales of the rank that holds it.
  ScaledOperand scaled_operand_at(Operand MatmulCall::* operand, Scales MatmulCall::* scales, bool is_adjacent_in_k,
                                  const CommonRange& k, int along_k, const CommonRange& other, int64_t at) const {
    const int64_t proc_k = k.proc[along_k], proc = other.proc[1], local_k = k.local[along_k],
                  local = other.local[1] + at;
    const int64_t rank = is_adjacent_in_k ? rank_of((call_.*operand).desc.grid, proc_k, proc)
                                          : rank_of((call_.*operand).desc.grid, proc, proc_k);
    const MatmulCall& holder = *product_.calls[static_cast<size_t>(rank)];
    const Operand& x = holder.*operand;
    const int64_t ld = x.desc.lld, first = is_adjacent_in_k ? local * ld + local_k : local_k * ld + local;
    return {x.desc.type,    x.data,  first,          ld,    is_adjacent_in_k,
            holder.*scales, local_k, x.local_rows(), local, x.local_cols()};
  }

  ScaledProduct scaled_product_of(const CommonRange& k) const {
    const bool is_a_k = call_.trans_a != abi::CUBLAS_OP_N, is_b_k = call_.trans_b == abi::CUBLAS_OP_N;
    const ScaledOperand a = scaled_operand_at(&MatmulCall::a, &MatmulCall::scale_a, is_a_k, k, 0, m_, tile_.row);
    const auto columns = [&](const CommonRange& n, int64_t col, int64_t cols) {
      return ScaledColumns{cols, scaled_operand_at(&MatmulCall::b, &MatmulCall::scale_b, is_b_k, k, 1, n, col)};
    };
    ScaledProduct product = {tile_.rows, tile_.cols, k.size, a, {}, z_.data, z_.ld};
    if (product_.tiling().is_together_in_b(tile_)) {
      product.b = {columns(n_, tile_.col, tile_.cols)};
      return product;
    }
    for (int32_t i = tile_.n_range; i < tile_.n_range + tile_.n_ranges; ++i) {
      product.b.push_back(columns(n_range_at(i), 0, n_range_at(i).size));
    }
    return product;
  }

  // Where op(X) is at (row, col), each given as the process coordinate and the local index along that axis of op(X).
  struct Index {
    int64_t proc, local;
  };
  MatrixView piece(Operand MatmulCall::* operand, bool is_plain, Index row, Index col) const {
    if (!is_plain) std::swap(row, col);
    const int64_t rank = rank_of((call_.*operand).desc.grid, row.proc, col.proc);
    return locate(product_.calls[static_cast<size_t>(rank)]->*operand, row.local, col.local);
  }

  void fill_zero() {
    const int64_t bytes = facts(call_.accumulator()).bytes;
    for (int64_t col = 0; col < tile_.cols; ++col) {
      std::memset(z_.data + col * z_.ld * bytes, 0, static_cast<size_t>(tile_.rows * bytes));
    }
  }

  const DistributedProduct& product_;
  const Tile tile_;
  const CommonRange& m_;
  const CommonRange& n_;    // the first one
  const MatmulCall& call_;  // rank 0's, for what all ranks share
  const KernelChoice kernel_;
  char* const scratch_;
  char* const boundary_;
  char* const gathered_;
  MatrixView z_;
  std::vector<TileStore> stores_;  // each range of n apart, where the tile is not in one piece in D
};

}  // namespace

void run_tile(const DistributedProduct& product, const Tile& tile, char* workspace) {
  TileTask(product, tile, workspace)();
}

}  // namespace jaxmp::hostmp
