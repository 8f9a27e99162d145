#include "csrc/hostmp/gradient.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "csrc/hostmp/elementwise.h"
#include "csrc/hostmp/epilog.h"

namespace jaxmp::hostmp {
namespace {

// Rows are summed in strips whose sums stay in the first cache; 2 KB of a column at a time are read in sequence.
constexpr int64_t kStrip = 512;

// Columns are summed in chunks of their global index, and chunks one after the other: the bits of a sum depend on
// neither tiles nor ranks nor threads, and its error grows with 64 + n / 64 terms instead of n.
constexpr int64_t kChunk = 64;

// A matrix whose columns are summed: who holds which, in ascending order.
struct Summed {
  Operand Call::* operand;
  std::vector<Run> rows, cols;
};

Summed find_summed(const Call& call, Gradient gradient) {
  // After an all-reduce every rank holds all of D: its descriptor lays the copies side by side, and any one will do.
  const int64_t rows = gradient == Gradient::kB ? call.n : call.m;
  const int64_t cols = gradient == Gradient::kD ? call.n : call.k;
  Operand Call::* const operand = gradient == Gradient::kA ? &Call::a : gradient == Gradient::kB ? &Call::b : &Call::d;
  const Operand& x = call.*operand;
  return {operand, runs(x.desc.rows, x.row, rows), runs(x.desc.cols, x.col, cols)};
}

// Where sums go: the local rows of D, or for B every one of them.
std::vector<Run> find_results(const Call& call, Gradient gradient) {
  if (gradient == Gradient::kB) return {{0, call.n, 0, 0}};
  return runs(call.d.desc.rows, call.d.row, call.m);
}

template <typename T, typename Out>
class GradientRun {
 public:
  GradientRun(const Product2D& product, Gradient gradient)
      : calls_(product.calls), gradient_(gradient), summed_(find_summed(*calls_[0], gradient)) {}

  void operator()() {
    for (const Cut& cut : common_cuts(find_results(*calls_[0], gradient_), summed_.rows)) {
      for (int64_t row = 0; row < cut.size; row += kStrip) {
        const int64_t count = std::min(kStrip, cut.size - row);
        sum(cut.proc[1], cut.local[1] + row, count);
        write(cut.proc[0], cut.local[0] + row, count);
      }
    }
  }

 private:
  void sum(int64_t proc_row, int64_t local_row, int64_t count) {
    std::fill(sums_, sums_ + count, T(0));
    std::fill(chunk_, chunk_ + count, T(0));
    for (const Run& run : summed_.cols) {
      const abi::cublasMpGrid& grid = (calls_[0]->*summed_.operand).desc.grid;
      const auto rank = static_cast<size_t>(rank_of(grid, proc_row, run.proc));
      const Operand& x = calls_[rank]->*summed_.operand;
      for (int64_t i = 0; i < run.size; ++i) {
        add(reinterpret_cast<const void*>(x.data), (run.local + i) * x.desc.lld + local_row, count);
        if ((run.begin + i) % kChunk == kChunk - 1) end_chunk(count);
      }
    }
    end_chunk(count);
  }

  // `from` holds elements of D's type, or of the operands', which D's may be wider than.
  void add(const void* from, int64_t offset, int64_t count) {
    const bool is_out = facts(type()).bytes == static_cast<int64_t>(sizeof(Out));
    if (is_out) return add_typed(static_cast<const Out*>(from) + offset, count);
    if constexpr (std::is_same_v<T, float>) {
      if (type() == abi::CUDA_R_16BF) return add_typed(static_cast<const BFloat16*>(from) + offset, count);
      if (type() == abi::CUDA_R_16F) return add_typed(static_cast<const Float16*>(from) + offset, count);
    }
  }

  abi::cudaDataType_t type() const { return (calls_[0]->*summed_.operand).desc.type; }

  template <typename From>
  void add_typed(const From* from, int64_t count) {
    if constexpr (std::is_same_v<From, T>) {
      for (int64_t i = 0; i < count; ++i) chunk_[i] += from[i];
    } else {
      widen(from, column_, count);
      for (int64_t i = 0; i < count; ++i) chunk_[i] += column_[i];
    }
  }

  void end_chunk(int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums_[i] += chunk_[i];
    std::fill(chunk_, chunk_ + count, T(0));
  }

  void write(int64_t proc_row, int64_t local_row, int64_t count) {
    for (const Call* call : calls_) {
      const bool holds_rows = gradient_ == Gradient::kB || row_of(call->grid(), call->rank) == proc_row;
      if (!holds_rows) continue;
      Out* const to = static_cast<Out*>(call->gradient) + local_row;
      if constexpr (std::is_same_v<T, Out>) {
        std::copy(sums_, sums_ + count, to);
      } else {
        narrow(sums_, to, count);
      }
    }
  }

  const std::vector<const Call*>& calls_;
  Gradient gradient_;
  Summed summed_;
  T sums_[kStrip], chunk_[kStrip], column_[kStrip];
};

}  // namespace

void sum_gradient(const Product2D& product) {
  const Call& call = *product.calls[0];
  const Gradient gradient = find_epilog(call.epilog)->gradient;
  if (gradient == Gradient::kNone) return;
  with_types(call.accumulator(), call.d.desc.type,
             [&](auto t, auto out) { GradientRun<decltype(t), decltype(out)>(product, gradient)(); });
}

}  // namespace jaxmp::hostmp
