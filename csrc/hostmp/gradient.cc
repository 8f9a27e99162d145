#include "csrc/hostmp/gradient.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "csrc/hostmp/elementwise.h"
#include "csrc/hostmp/epilog.h"

namespace jaxmp::hostmp {
namespace {

// Sums of this many rows stay in the first cache, and 1 KB of a column of floats at a time is read in sequence.
constexpr int64_t kStrip = 256;

// Columns are summed in chunks of their global index, and chunks one after the other: the bits of a sum depend on
// neither tiles nor ranks nor threads, and its error grows with 64 + n / 64 terms instead of n.
constexpr int64_t kChunk = 64;

Operand Call::* summed_operand(Gradient gradient) {
  return gradient == Gradient::kA ? &Call::a : gradient == Gradient::kB ? &Call::b : &Call::d;
}

template <typename T, typename Out>
class GradientRun {
 public:
  GradientRun(const Product2D& product, const GradientWork& work, Gradient gradient)
      : calls_(product.calls), work_(work), gradient_(gradient), operand_(summed_operand(gradient)) {}

  void operator()(const Strip& strip) {
    sum(strip.proc, strip.local, strip.rows);
    write(strip.result_proc, strip.result_local, strip.rows);
  }

 private:
  void sum(int64_t proc_row, int64_t local_row, int64_t count) {
    std::fill(sums_, sums_ + count, T(0));
    std::fill(chunk_, chunk_ + count, T(0));
    for (const Run& run : work_.cols) {
      const abi::cublasMpGrid& grid = (calls_[0]->*operand_).desc.grid;
      const auto rank = static_cast<size_t>(rank_of(grid, proc_row, run.proc));
      const Operand& x = calls_[rank]->*operand_;
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

  abi::cudaDataType_t type() const { return (calls_[0]->*operand_).desc.type; }

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
  const GradientWork& work_;
  Gradient gradient_;
  Operand Call::* operand_;
  T sums_[kStrip], chunk_[kStrip], column_[kStrip];
};

}  // namespace

GradientWork make_gradient(const Call& call) {
  const Gradient gradient = find_epilog(call.epilog)->gradient;
  GradientWork work;
  if (gradient == Gradient::kNone) return work;
  work.needs_d = gradient == Gradient::kD;
  const bool is_of_b = gradient == Gradient::kB;
  const Operand& x = call.*summed_operand(gradient);
  // After an all-reduce every rank holds all of D: its descriptor lays the copies side by side, and the first will do.
  work.cols = runs(x.desc.cols, x.col, work.needs_d ? call.n : call.k);
  // Sums of B go to every rank whole, the others to where D has the row.
  const auto results = is_of_b ? std::vector<Run>{{0, call.n, 0, 0}} : runs(call.d.desc.rows, call.d.row, call.m);
  for (const Cut& cut : common_cuts(results, runs(x.desc.rows, x.row, is_of_b ? call.n : call.m))) {
    for (int64_t row = 0; row < cut.size; row += kStrip) {
      work.strips.push_back(
          {cut.proc[1], cut.local[1] + row, cut.proc[0], cut.local[0] + row, std::min(kStrip, cut.size - row)});
    }
  }
  return work;
}

void sum_strip(const Product2D& product, const GradientWork& work, const Strip& strip) {
  const Call& call = *product.calls[0];
  const Gradient gradient = find_epilog(call.epilog)->gradient;
  with_types(call.accumulator(), call.d.desc.type,
             [&](auto t, auto out) { GradientRun<decltype(t), decltype(out)>(product, work, gradient)(strip); });
}

}  // namespace jaxmp::hostmp
