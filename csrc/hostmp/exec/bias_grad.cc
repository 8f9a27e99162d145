#include "csrc/hostmp/exec/bias_grad.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/exec/epilog.h"

namespace jaxmp::hostmp {
namespace {

// Sums of this many rows stay in the first cache, and 1 KB of a column of floats at a time is read in sequence.
constexpr int64_t kStrip = 256;
constexpr int64_t kChunk = 64;
// Chunks that one thread takes at a time: 512 KB of floats, beside which a counter is nothing.
constexpr int64_t kGroup = 8;

Operand Call::* summed_operand(Gradient gradient) {
  return gradient == Gradient::kA ? &Call::a : gradient == Gradient::kB ? &Call::b : &Call::d;
}

template <typename T, typename Out>
class GradientRun {
 public:
  GradientRun(const Product2D& product, const GradientWork& work)
      : calls_(product.calls),
        work_(work),
        gradient_(find_epilog(product.calls[0]->epilog)->gradient),
        operand_(summed_operand(gradient_)) {}

  void sum(size_t strip, int64_t group) {
    const int64_t last = std::min(work_.chunks, (group + 1) * kGroup);
    for (int64_t chunk = group * kGroup; chunk < last; ++chunk) sum_chunk(work_.strips[strip], chunk);
  }

  void write(size_t strip) {
    const Strip& s = work_.strips[strip];
    T total[kStrip];
    std::fill(total, total + s.rows, T(0));
    for (int64_t chunk = 0; chunk < work_.chunks; ++chunk) {
      const T* const sums = sums_of(s, chunk);
      for (int64_t i = 0; i < s.rows; ++i) total[i] += sums[i];
    }
    for (const Call* call : calls_) {
      const bool holds_rows = gradient_ == Gradient::kB || row_of(call->grid(), call->rank) == s.result_proc;
      if (!holds_rows) continue;
      Out* const to = static_cast<Out*>(call->gradient) + s.result_local;
      if constexpr (std::is_same_v<T, Out>) {
        std::copy(total, total + s.rows, to);
      } else {
        narrow(total, to, s.rows);
      }
    }
  }

 private:
  T* sums_of(const Strip& strip, int64_t chunk) const {
    return reinterpret_cast<T*>(work_.sums.get()) + strip.begin * work_.chunks + chunk * strip.rows;
  }

  void sum_chunk(const Strip& s, int64_t chunk) {
    T* const sums = sums_of(s, chunk);
    std::fill(sums, sums + s.rows, T(0));
    const int64_t begin = chunk * kChunk, end = begin + kChunk;
    const auto starts_behind = [](int64_t index, const Run& run) { return index < run.begin; };
    auto run = std::upper_bound(work_.cols.begin(), work_.cols.end(), begin, starts_behind) - 1;
    for (; run != work_.cols.end() && run->begin < end; ++run) {
      const abi::cublasMpGrid& grid = (calls_[0]->*operand_).desc.grid;
      const Operand& x = calls_[static_cast<size_t>(rank_of(grid, s.proc, run->proc))]->*operand_;
      const int64_t from = std::max(begin, run->begin), to = std::min(end, run->begin + run->size);
      for (int64_t col = from; col < to; ++col) {
        add(x.data, (run->local + col - run->begin) * x.desc.lld + s.local, s.rows, sums);
      }
    }
  }

  // `from` holds elements of D's type, or of the operands', which D's may be wider than.
  void add(const void* from, int64_t offset, int64_t count, T* sums) const {
    const abi::cudaDataType_t type = (calls_[0]->*operand_).desc.type;
    const bool is_out = facts(type).bytes == static_cast<int64_t>(sizeof(Out));
    if (is_out) return add_typed(static_cast<const Out*>(from) + offset, count, sums);
    if constexpr (std::is_same_v<T, float>) {
      if (type == abi::CUDA_R_16BF) return add_typed(static_cast<const BFloat16*>(from) + offset, count, sums);
      if (type == abi::CUDA_R_16F) return add_typed(static_cast<const Float16*>(from) + offset, count, sums);
    }
  }

  template <typename From>
  static void add_typed(const From* from, int64_t count, T* sums) {
    if constexpr (std::is_same_v<From, T>) {
      for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
    } else {
      T column[kStrip];
      widen(from, column, count);
      for (int64_t i = 0; i < count; ++i) sums[i] += column[i];
    }
  }

  const std::vector<const Call*>& calls_;
  const GradientWork& work_;
  const Gradient gradient_;
  Operand Call::* const operand_;
};

// f(run) with the run of the product's types.
template <typename Function>
void with_run(const Product2D& product, const GradientWork& work, Function function) {
  const Call& call = *product.calls[0];
  with_types(call.accumulator(), call.d.desc.type, [&](auto t, auto out) {
    GradientRun<decltype(t), decltype(out)> run(product, work);
    function(run);
  });
}

// f(piece) for every piece of D that the tile writes a part of.
template <typename Function>
void for_pieces_of(const Product2D& product, const GradientWork& work, const Tile& tile, Function function) {
  const int64_t row = product.tiling().m[static_cast<size_t>(tile.m_cut)].begin + tile.row;
  const int64_t col = product.tiling().n[static_cast<size_t>(tile.n_cut)].begin + tile.col;
  const auto starts_behind = [](int64_t index, const Strip& strip) { return index < strip.begin; };
  auto strip = std::upper_bound(work.strips.begin(), work.strips.end(), row, starts_behind) - 1;
  for (; strip != work.strips.end() && strip->begin < row + tile.rows; ++strip) {
    for (int64_t group = col / (kGroup * kChunk); group * kGroup * kChunk < col + tile.cols; ++group) {
      function(static_cast<size_t>((strip - work.strips.begin()) * work.groups + group));
    }
  }
}

}  // namespace

GradientWork make_gradient(const Product2D& product) {
  const Call& call = *product.calls[0];
  const Gradient gradient = find_epilog(call.epilog)->gradient;
  GradientWork work;
  if (gradient == Gradient::kNone) return work;
  work.needs_d = gradient == Gradient::kD;
  const bool is_of_b = gradient == Gradient::kB;
  const Operand& x = call.*summed_operand(gradient);
  // After an all-reduce every rank holds all of D: its descriptor lays the copies side by side, and the first will do.
  const int64_t extent = work.needs_d ? call.n : call.k;
  work.cols = runs(x.desc.cols, x.col, extent);
  work.chunks = ceil_div(extent, kChunk);
  work.groups = std::max<int64_t>(1, ceil_div(work.chunks, kGroup));  // sums over nothing are written too
  // Sums of B go to every rank whole, the others to where D has the row.
  const auto results = is_of_b ? std::vector<Run>{{0, call.n, 0, 0}} : runs(call.d.desc.rows, call.d.row, call.m);
  for (const Cut& cut : common_cuts(results, runs(x.desc.rows, x.row, is_of_b ? call.n : call.m))) {
    for (int64_t row = 0; row < cut.size; row += kStrip) {
      work.strips.push_back({cut.begin + row, cut.proc[1], cut.local[1] + row, cut.proc[0], cut.local[0] + row,
                             std::min(kStrip, cut.size - row)});
    }
  }
  const int64_t rows = work.strips.empty() ? 0 : work.strips.back().begin + work.strips.back().rows;
  work.sums.reset(new char[static_cast<size_t>(rows * work.chunks * facts(call.accumulator()).bytes)]);
  if (work.needs_d) {
    work.awaited.reset(new std::atomic<int>[work.pieces()]());
    for (const Tile& tile : product.tiling().tiles) {
      for_pieces_of(product, work, tile, [&](size_t piece) { ++work.awaited[piece]; });
    }
  }
  return work;
}

void sum_piece(const Product2D& product, const GradientWork& work, size_t piece) {
  const auto groups = static_cast<size_t>(work.groups);
  with_run(product, work, [&](auto& run) { run.sum(piece / groups, static_cast<int64_t>(piece % groups)); });
}

void sum_ready(const Product2D& product, const GradientWork& work, const Tile& tile) {
  if (!work.needs_d) return;
  for_pieces_of(product, work, tile, [&](size_t piece) {
    if (work.awaited[piece].fetch_sub(1, std::memory_order_acq_rel) == 1) sum_piece(product, work, piece);
  });
}

void write_gradient(const Product2D& product, const GradientWork& work) {
  if (work.strips.empty()) return;
  with_run(product, work, [&](auto& run) {
    for (size_t strip = 0; strip < work.strips.size(); ++strip) run.write(strip);
  });
}

}  // namespace jaxmp::hostmp
