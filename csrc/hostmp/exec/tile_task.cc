#include "csrc/hostmp/exec/tile_task.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/exec/tile_store.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/scaled_gemm.h"

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
        kernel_(KernelOf(call_, tile.cols, product.is_one_matrix)),
        scratch_(workspace ? workspace + product.area().sums_bytes : nullptr),
        boundary_(scratch_ + product.area().scratch_bytes),
        gathered_(boundary_ + product.area().boundary_bytes),
        z_{workspace, tile.rows} {
    if (product.tiling().IsTogetherInD(tile)) {
      const TileOrigin origin = OriginOf(n_, tile.col);
      const bool is_in_d = SumsInD(call_, product.tiling(), tile);
      if (is_in_d) z_ = Locate(product.calls[static_cast<size_t>(origin.rank)]->d, origin.row, origin.col);
      stores_.emplace_back(product.calls, origin, tile.rows, tile.cols, z_, is_in_d, scratch_);
      return;
    }
    for (int32_t i = tile.n_range; i < tile.n_range + tile.n_ranges; ++i) {
      const CommonRange& n = NRangeAt(i);
      char* const z = z_.data + BytesOf(call_.accumulator(), (n.begin - n_.begin) * z_.ld);
      stores_.emplace_back(product.calls, OriginOf(n, 0), tile.rows, n.size, MatrixView{z, z_.ld}, false, scratch_);
    }
  }

  void operator()() {
    call_.scales_last() ? SumThenScale() : Sum();
    for (const TileStore& store : stores_) store.Finish();
    if (product_.is_mirrored()) StoreMirrored();
  }

 private:
  const CommonRange& NRangeAt(int32_t i) const { return product_.tiling().n[static_cast<size_t>(i)]; }

  // Where D has the tile's first row and column `col` of a range of n.
  TileOrigin OriginOf(const CommonRange& n, int64_t col) const {
    const int64_t rank = call_.is_all_reduce ? 0 : RankOf(call_.grid(), m_.proc[0], n.proc[0]);
    return {rank, m_.local[0] + tile_.row, n.local[0] + col};
  }

  // Stores the tile's transpose on the other side of the diagonal.
  void StoreMirrored() const {
    if (tile_.m_range == tile_.n_range && tile_.row == tile_.col) return;
    const CommonRange& rows = product_.tiling().m[static_cast<size_t>(tile_.n_range)];
    const CommonRange& cols = NRangeAt(tile_.m_range);
    const int64_t rank = call_.is_all_reduce ? 0 : RankOf(call_.grid(), rows.proc[0], cols.proc[0]);
    stores_.front().Mirror({rank, rows.local[0] + tile_.col, cols.local[0] + tile_.row});
  }

  // z = beta C, then adds the products in the order that is fastest for the kernel.
  void Sum() {
    bool is_started = stores_.size() > 1;  // some stores may read C and others not
    if (is_started) FillZero();
    for (const TileStore& store : stores_) is_started = store.AddC(is_started);
    if (!product_.tiling().k.empty()) return Multiply(is_started);
    if (!is_started) FillZero();
  }

  // z = alpha (the sum over k in ascending order) + beta C.
  void SumThenScale() {
    product_.tiling().k.empty() ? FillZero() : Multiply(false);
    const std::complex<double> alpha = call_.alpha * TensorScale();
    if (call_.scales_integers()) {
      ScaleColumns(alpha.real());
    } else if (alpha != 1.0) {
      ScaleSums(z_.data, z_.ld, tile_.rows, tile_.cols, alpha, call_.accumulator(), call_.takes_scales());
    }
    for (const TileStore& store : stores_) store.AddC(true);
  }

  // Turns integer sums into floats, times alpha and the scales of their row and column. A rank holds the scales of the
  // rows and columns of its part of an operand.
  void ScaleColumns(double alpha) {
    const ScaledProduct p = ScaledProductOf(product_.tiling().k.empty() ? CommonRange{} : product_.tiling().k.front());
    const float* const of_rows = p.a.scales.of_outer(p.a.outer);
    float* z = reinterpret_cast<float*>(z_.data);
    for (const auto& [n, x] : p.b) {
      const float* const of_cols = x.scales.of_outer(x.outer);
      for (int64_t col = 0; col < n; ++col, z += z_.ld) {
        ScaleIntegers(z, of_rows, of_cols ? alpha * of_cols[col] : alpha, tile_.rows);
      }
    }
  }

  // The product of the tensor-wide scales of A and B; the ranks agree on them.
  double TensorScale() const {
    double scale = 1;
    for (const Scales* scales : {&call_.scale_a, &call_.scale_b}) {
      if (scales->mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32) scale *= static_cast<double>(scales->scalar());
    }
    return scale;
  }

  // z = alpha op(A) op(B), or z += it if `adds`.
  void Multiply(bool adds) {
    const std::complex<double> alpha = call_.scales_last() ? 1.0 : call_.alpha;
    if (call_.is_decoded()) return MultiplyDecoded(alpha.real(), adds);
    const KSegments segments = call_.fixed_reduction_order ? SegmentsOfWholeUnits() : SegmentsOfK();
    hostmp::Multiply(kernel_, segments, alpha, adds, scratch_);
  }

  void MultiplyDecoded(double alpha, bool adds) {
    std::vector<ScaledProduct> segments;
    for (const CommonRange& range : product_.tiling().k) segments.push_back(ScaledProductOf(range));
    if (call_.fixed_reduction_order) return ScaledGemm(kernel_, segments, alpha, adds, scratch_);
    for (const ScaledProduct& segment : segments) {
      ScaledGemm(kernel_, {segment}, alpha, adds || &segment != segments.data(), scratch_);
    }
  }

  KSegments SegmentsOfWholeUnits() {
    const std::vector<CommonRange>& ranges = product_.tiling().k;
    std::vector<int64_t> ends;
    for (const CommonRange& range : ranges) ends.push_back(range.begin + range.size);
    return CutAtUnits(
        ends, KUnit(kernel_.kernel),
        [&](size_t i, int64_t begin, int64_t end) { return ProductOf(SubRange(ranges[i], begin, end)); }, boundary_);
  }

  Product ProductOf(const CommonRange& k) const {
    const MatrixView a =
        Piece(&MatmulCall::a, call_.is_a_plain(), {m_.proc[1], m_.local[1] + tile_.row}, {k.proc[0], k.local[0]});
    const MatrixView b = product_.tiling().IsTogetherInB(tile_) ? PieceOfB(k, n_, tile_.col) : GatheredB(k);
    return {call_.trans_a, call_.trans_b, tile_.rows, tile_.cols, k.size, a.data, a.ld, b.data, b.ld, z_.data, z_.ld};
  }

  MatrixView PieceOfB(const CommonRange& k, const CommonRange& n, int64_t col) const {
    return Piece(&MatmulCall::b, call_.is_b_plain(), {k.proc[1], k.local[1]}, {n.proc[1], n.local[1] + col});
  }

  // Copies the columns of all ranks next to each other, in the layout of B.
  MatrixView GatheredB(const CommonRange& k) const {
    const abi::cudaDataType_t type = call_.b.desc.type;
    const bool is_plain = call_.is_b_plain();
    const MatrixView all = {gathered_ + BytesOf(type, k.begin * tile_.cols), is_plain ? k.size : tile_.cols};
    for (int32_t i = tile_.n_range; i < tile_.n_range + tile_.n_ranges; ++i) {
      const CommonRange& n = NRangeAt(i);
      const int64_t col = n.begin - n_.begin;
      const MatrixView from = PieceOfB(k, n, 0);
      char* const to = all.data + BytesOf(type, is_plain ? col * all.ld : col);
      CopyView(type, from, is_plain ? k.size : n.size, is_plain ? n.size : k.size, {to, all.ld});
    }
    return all;
  }

  KSegments SegmentsOfK() const {
    KSegments segments;
    for (const CommonRange& range : product_.tiling().k) segments.push_back(ProductOf(range));
    return segments;
  }

  // The operand's piece, with the scales of the rank that holds it.
  ScaledOperand ScaledOperandAt(Operand MatmulCall::* operand, Scales MatmulCall::* scales, bool is_adjacent_in_k,
                                const CommonRange& k, int along_k, const CommonRange& other, int64_t at) const {
    const int64_t proc_k = k.proc[along_k], proc = other.proc[1], local_k = k.local[along_k],
                  local = other.local[1] + at;
    const int64_t rank = is_adjacent_in_k ? RankOf((call_.*operand).desc.grid, proc_k, proc)
                                          : RankOf((call_.*operand).desc.grid, proc, proc_k);
    const MatmulCall& holder = *product_.calls[static_cast<size_t>(rank)];
    const Operand& x = holder.*operand;
    const int64_t ld = x.desc.lld, first = is_adjacent_in_k ? local * ld + local_k : local_k * ld + local;
    return {x.desc.type,    x.data,  first,          ld,    is_adjacent_in_k,
            holder.*scales, local_k, x.local_rows(), local, x.local_cols()};
  }

  ScaledProduct ScaledProductOf(const CommonRange& k) const {
    const bool is_a_k = call_.trans_a != abi::CUBLAS_OP_N, is_b_k = call_.trans_b == abi::CUBLAS_OP_N;
    const ScaledOperand a = ScaledOperandAt(&MatmulCall::a, &MatmulCall::scale_a, is_a_k, k, 0, m_, tile_.row);
    const auto columns = [&](const CommonRange& n, int64_t col, int64_t cols) {
      return ScaledColumns{cols, ScaledOperandAt(&MatmulCall::b, &MatmulCall::scale_b, is_b_k, k, 1, n, col)};
    };
    ScaledProduct product = {tile_.rows, tile_.cols, k.size, a, {}, z_.data, z_.ld};
    if (product_.tiling().IsTogetherInB(tile_)) {
      product.b = {columns(n_, tile_.col, tile_.cols)};
      return product;
    }
    for (int32_t i = tile_.n_range; i < tile_.n_range + tile_.n_ranges; ++i) {
      product.b.push_back(columns(NRangeAt(i), 0, NRangeAt(i).size));
    }
    return product;
  }

  // Finds op(X) at (row, col); an index is a process coordinate and a local index along that axis of op(X).
  struct Index {
    int64_t proc, local;
  };
  MatrixView Piece(Operand MatmulCall::* operand, bool is_plain, Index row, Index col) const {
    if (!is_plain) std::swap(row, col);
    const int64_t rank = RankOf((call_.*operand).desc.grid, row.proc, col.proc);
    return Locate(product_.calls[static_cast<size_t>(rank)]->*operand, row.local, col.local);
  }

  void FillZero() {
    const int64_t bytes = Facts(call_.accumulator()).bytes;
    for (int64_t col = 0; col < tile_.cols; ++col) {
      std::memset(z_.data + col * z_.ld * bytes, 0, static_cast<size_t>(tile_.rows * bytes));
    }
  }

  const DistributedProduct& product_;
  const Tile tile_;
  const CommonRange& m_;
  const CommonRange& n_;    // the tile's first range of n
  const MatmulCall& call_;  // rank 0's, for everything that all ranks share
  const KernelChoice kernel_;
  char* const scratch_;
  char* const boundary_;
  char* const gathered_;
  MatrixView z_;
  std::vector<TileStore> stores_;  // one for each range of n if the tile is not in one piece in D
};

}  // namespace

bool IsOneMatrix(const std::vector<const MatmulCall*>& calls) {
  return calls[0]->may_be_symmetric() && std::all_of(calls.begin(), calls.end(), [](const MatmulCall* call) {
           return call->a.data == call->b.data && call->a.desc.lld == call->b.desc.lld;
         });
}

void RunTile(const DistributedProduct& product, const Tile& tile, char* workspace) {
  TileTask(product, tile, workspace)();
}

}  // namespace jaxmp::hostmp
