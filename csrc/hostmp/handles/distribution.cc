#include "csrc/hostmp/handles/distribution.h"

#include <algorithm>

namespace jaxmp::hostmp {

bool AreAlike(const Axis& x, const Axis& y) {
  if (x.extent != y.extent || x.nprocs != y.nprocs) return false;
  return x.nprocs == 1 || (x.block == y.block && x.source == y.source);
}

int64_t LocalExtent(const Axis& axis, int64_t proc) {
  const int64_t blocks = axis.extent / axis.block;  // full blocks
  const int64_t position = (proc - axis.source + axis.nprocs) % axis.nprocs;
  int64_t held = blocks / axis.nprocs * axis.block;
  const int64_t left_over = blocks % axis.nprocs;
  if (position < left_over) held += axis.block;
  if (position == left_over) held += axis.extent % axis.block;
  return held;
}

std::vector<LocalRange> LocalRanges(const Axis& axis, int64_t offset, int64_t size) {
  std::vector<LocalRange> found;
  if (size <= 0) return found;
  if (axis.nprocs == 1) {
    found.push_back({0, size, 0, offset});
    return found;
  }
  for (int64_t at = offset; at < offset + size;) {
    const int64_t block = at / axis.block;
    const int64_t end = std::min(offset + size, (block + 1) * axis.block);
    const int64_t local = block / axis.nprocs * axis.block + at % axis.block;
    found.push_back({at - offset, end - at, (block + axis.source) % axis.nprocs, local});
    at = end;
  }
  return found;
}

std::vector<CommonRange> CommonRanges(const std::vector<LocalRange>& first, const std::vector<LocalRange>& second) {
  std::vector<CommonRange> cuts;
  cuts.reserve(std::max(first.size(), second.size()));
  for (size_t i = 0, j = 0; i < first.size() && j < second.size();) {
    const LocalRange& x = first[i];
    const LocalRange& y = second[j];
    const int64_t begin = std::max(x.begin, y.begin);
    const int64_t end = std::min(x.begin + x.size, y.begin + y.size);
    cuts.push_back({begin, end - begin, {x.proc, y.proc}, {x.local + begin - x.begin, y.local + begin - y.begin}});
    if (x.begin + x.size == end) ++i;
    if (y.begin + y.size == end) ++j;
  }
  return cuts;
}

CommonRange SubRange(const CommonRange& range, int64_t begin, int64_t end) {
  const int64_t skipped = begin - range.begin;
  return {begin, end - begin, {range.proc[0], range.proc[1]}, {range.local[0] + skipped, range.local[1] + skipped}};
}

std::vector<CommonRange> CutAt(const std::vector<CommonRange>& ranges, const std::vector<CommonRange>& others) {
  std::vector<CommonRange> cuts;
  auto other = others.begin();
  for (const CommonRange& range : ranges) {
    const int64_t end = range.begin + range.size;
    int64_t at = range.begin;
    for (; other != others.end() && other->begin < end; ++other) {
      if (other->begin <= at) continue;
      cuts.push_back(SubRange(range, at, other->begin));
      at = other->begin;
    }
    cuts.push_back(SubRange(range, at, end));
  }
  return cuts;
}

}  // namespace jaxmp::hostmp
