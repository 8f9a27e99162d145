// Where the elements of a distributed matrix are stored: ScaLAPACK's block-cyclic distribution, one axis at a time.
//
// An axis of `extent` indices is cut into blocks of `block`, dealt round-robin to `nprocs` processes, the first block
// to `source`. Worked example: extent 10, block 3, nprocs 2, source 0 puts global 0 1 2 | 6 7 8 on process 0 (local
// 0..5) and 3 4 5 | 9 on process 1 (local 0..3).
#pragma once

#include <cstdint>
#include <vector>

namespace jaxmp::hostmp {

struct Axis {
  int64_t extent = 0;
  int64_t block = 1;
  int64_t nprocs = 1;
  int64_t source = 0;
};

// True if two axes put every index in the same place. Blocks on one process do not matter.
bool AreAlike(const Axis& x, const Axis& y);

// Returns the number of indices of the axis that process `proc` holds.
int64_t LocalExtent(const Axis& axis, int64_t proc);

// A run of indices that are adjacent in one process's memory.
struct LocalRange {
  int64_t begin;  // relative to the first index asked for
  int64_t size;
  int64_t proc;
  int64_t local;  // index of the first element within the process's part
};

// Splits the indices [offset, offset + size) of the axis into ranges, in ascending order and as long as possible.
std::vector<LocalRange> LocalRanges(const Axis& axis, int64_t offset, int64_t size);

// Ranges of the same indices in two axes, cut at the boundaries of both.
struct CommonRange {
  int64_t begin, size;
  int64_t proc[2], local[2];
};
std::vector<CommonRange> CommonRanges(const std::vector<LocalRange>& first, const std::vector<LocalRange>& second);

// Returns the indices [begin, end) of a range.
CommonRange SubRange(const CommonRange& range, int64_t begin, int64_t end);

// Cuts the ranges also where one of `others` begins.
std::vector<CommonRange> CutAt(const std::vector<CommonRange>& ranges, const std::vector<CommonRange>& others);

}  // namespace jaxmp::hostmp
