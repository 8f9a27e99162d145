#include "csrc/hostmp/exec/bias_grad.h"

#include <algorithm>
#include <type_traits>

#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/low_precision.h"

namespace jaxmp::hostmp {
namespace {

// Rows summed at a time: their sums stay in the L1 cache, and 1 KB of a column of floats is read in sequence.
constexpr int64_t kMostRows = 256;
constexpr int64_t kReductionBlock = 64;
// Reduction blocks that a thread takes at a time: 512 KB of floats, so that the shared counter costs little.
constexpr int64_t kGroup = 8;

Operand MatmulCall::* SummedOperand(Gradient gradient) {
  return gradient == Gradient::kA ? &MatmulCall::a : gradient == Gradient::kB ? &MatmulCall::b : &MatmulCall::d;
}

template <typename T, typename Out>
class BiasGradReduction {
 public:
  BiasGradReduction(const DistributedProduct& product, const BiasGrad& work)
      : calls_(product.calls),
        work_(work),
        gradient_(FindEpilog(product.calls[0]->epilog)->gradient),
        operand_(SummedOperand(gradient_)) {}

  void Sum(size_t row_range, int64_t group) {
    const int64_t last = std::min(work_.blocks, (group + 1) * kGroup);
    for (int64_t block = group * kGroup; block < last; ++block) SumBlock(work_.row_ranges[row_range], block);
  }

  void Write(size_t row_range) {
    const RowRange& s = work_.row_ranges[row_range];
    T total[kMostRows];
    std::fill(total, total + s.rows, T(0));
    for (int64_t block = 0; block < work_.blocks; ++block) {
      const T* const sums = SumsOf(s, block);
      for (int64_t i = 0; i < s.rows; ++i) total[i] += sums[i];
    }
    for (const MatmulCall* call : calls_) {
      const bool holds_rows = gradient_ == Gradient::kB || RowOf(call->grid(), call->rank) == s.result_proc;
      if (!holds_rows) continue;
      Out* const to = static_cast<Out*>(call->gradient) + s.result_local;
      if constexpr (std::is_same_v<T, Out>) {
        std::copy(total, total + s.rows, to);
      } else {
        Downconvert(total, to, s.rows);
      }
    }
  }

 private:
  T* SumsOf(const RowRange& row_range, int64_t block) const {
    return reinterpret_cast<T*>(work_.sums.get()) + row_range.begin * work_.blocks + block * row_range.rows;
  }

  void SumBlock(const RowRange& s, int64_t block) {
    T* const sums = SumsOf(s, block);
    std::fill(sums, sums + s.rows, T(0));
    const int64_t begin = block * kReductionBlock, end = begin + kReductionBlock;
    const auto starts_after = [](int64_t index, const LocalRange& run) { return index < run.begin; };
    auto run = std::upper_bound(work_.cols.begin(), work_.cols.end(), begin, starts_after) - 1;
    for (; run != work_.cols.end() && run->begin < end; ++run) {
      const abi::cublasMpGrid& grid = (calls_[0]->*operand_).desc.grid;
      const Operand& x = calls_[static_cast<size_t>(RankOf(grid, s.proc, run->proc))]->*operand_;
      const int64_t from = std::max(begin, run->begin), to = std::min(end, run->begin + run->size);
      for (int64_t col = from; col < to; ++col) {
        Add(x.data, (run->local + col - run->begin) * x.desc.lld + s.local, s.rows, sums);
      }
    }
  }

  // Adds `count` elements of the summed matrix to `sums`: elements of type T or, if T is float, of a narrower type.
  void Add(const void* from, int64_t offset, int64_t count, T* sums) const {
    const abi::cudaDataType_t type = (calls_[0]->*operand_).desc.type;
    if constexpr (std::is_same_v<T, float>) {
      if (type == abi::CUDA_R_16BF) return AddTyped(static_cast<const BFloat16*>(from) + offset, count, sums);
      if (type == abi::CUDA_R_16F) return AddTyped(static_cast<const Float16*>(from) + offset, count, sums);
      if (Facts(type).is_low_precision) {
        float column[kMostRows];
        Decode(type, from, offset, count, 1.0f, column);
        return AddTyped(column, count, sums);
      }
    }
    AddTyped(static_cast<const T*>(from) + offset, count, sums);
  }

  template <typename From>
  static void AddTyped(const From* from, int64_t count, T* sums) {
    if constexpr (std::is_same_v<From, T>) {
      for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
    } else {
      T column[kMostRows];
      Widen(from, column, count);
      for (int64_t i = 0; i < count; ++i) sums[i] += column[i];
    }
  }

  const std::vector<const MatmulCall*>& calls_;
  const BiasGrad& work_;
  const Gradient gradient_;
  Operand MatmulCall::* const operand_;
};

// Calls f(run) with the reduction for the product's types.
template <typename Function>
void WithReduction(const DistributedProduct& product, const BiasGrad& work, Function function) {
  const MatmulCall& call = *product.calls[0];
  WithTypes(call.accumulator(), call.d.desc.type, [&](auto t, auto out) {
    BiasGradReduction<decltype(t), decltype(out)> run(product, work);
    function(run);
  });
}

// Calls f(piece) for every piece of D that the tile writes a part of.
template <typename Function>
void ForPiecesOf(const DistributedProduct& product, const BiasGrad& work, const Tile& tile, Function function) {
  const int64_t row = product.tiling().m[static_cast<size_t>(tile.m_range)].begin + tile.row;
  const int64_t col = product.tiling().n[static_cast<size_t>(tile.n_range)].begin + tile.col;
  const auto starts_after = [](int64_t index, const RowRange& row_range) { return index < row_range.begin; };
  auto row_range = std::upper_bound(work.row_ranges.begin(), work.row_ranges.end(), row, starts_after) - 1;
  for (; row_range != work.row_ranges.end() && row_range->begin < row + tile.rows; ++row_range) {
    for (int64_t group = col / (kGroup * kReductionBlock); group * kGroup * kReductionBlock < col + tile.cols;
         ++group) {
      function(static_cast<size_t>((row_range - work.row_ranges.begin()) * work.groups + group));
    }
  }
}

}  // namespace

BiasGrad MakeBiasGrad(const DistributedProduct& product) {
  const MatmulCall& call = *product.calls[0];
  const Gradient gradient = FindEpilog(call.epilog)->gradient;
  BiasGrad work;
  if (gradient == Gradient::kNone) return work;
  work.needs_d = gradient == Gradient::kD;
  const bool is_of_b = gradient == Gradient::kB;
  const Operand& x = call.*SummedOperand(gradient);
  // After an all-reduce every rank holds all of D. The descriptor describes the copies side by side; the first is read.
  const int64_t extent = work.needs_d ? call.n : call.k;
  work.cols = LocalRanges(x.desc.cols, x.col, extent);
  work.blocks = CeilDiv(extent, kReductionBlock);
  work.groups = std::max<int64_t>(1, CeilDiv(work.blocks, kGroup));  // sums over nothing are written too
  // Sums over B go whole to every rank; other sums go to the ranks that hold the same rows of D.
  const auto results =
      is_of_b ? std::vector<LocalRange>{{0, call.n, 0, 0}} : LocalRanges(call.d.desc.rows, call.d.row, call.m);
  for (const CommonRange& cut : CommonRanges(results, LocalRanges(x.desc.rows, x.row, is_of_b ? call.n : call.m))) {
    for (int64_t row = 0; row < cut.size; row += kMostRows) {
      work.row_ranges.push_back({cut.begin + row, cut.proc[1], cut.local[1] + row, cut.proc[0], cut.local[0] + row,
                                 std::min(kMostRows, cut.size - row)});
    }
  }
  const int64_t rows = work.row_ranges.empty() ? 0 : work.row_ranges.back().begin + work.row_ranges.back().rows;
  work.sums.reset(new char[static_cast<size_t>(rows * work.blocks * Facts(call.accumulator()).bytes)]);
  if (work.needs_d) {
    work.awaited.reset(new std::atomic<int>[work.pieces()]());
    for (const Tile& tile : product.tiling().tiles) {
      ForPiecesOf(product, work, tile, [&](size_t piece) { ++work.awaited[piece]; });
    }
  }
  return work;
}

void SumPiece(const DistributedProduct& product, const BiasGrad& work, size_t piece) {
  const auto groups = static_cast<size_t>(work.groups);
  WithReduction(product, work, [&](auto& run) { run.Sum(piece / groups, static_cast<int64_t>(piece % groups)); });
}

void SumReady(const DistributedProduct& product, const BiasGrad& work, const Tile& tile) {
  if (!work.needs_d) return;
  ForPiecesOf(product, work, tile, [&](size_t piece) {
    if (work.awaited[piece].fetch_sub(1, std::memory_order_acq_rel) == 1) SumPiece(product, work, piece);
  });
}

void WriteBiasGrad(const DistributedProduct& product, const BiasGrad& work) {
  if (work.row_ranges.empty()) return;
  WithReduction(product, work, [&](auto& run) {
    for (size_t row_range = 0; row_range < work.row_ranges.size(); ++row_range) run.Write(row_range);
  });
}

}  // namespace jaxmp::hostmp
