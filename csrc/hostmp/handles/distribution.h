// Where the elements of a distributed matrix live: ScaLAPACK's block-cyclic distribution, one axis at a time.
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

// How many indices of the axis process `proc` holds.
int64_t LocalExtent(const Axis& axis, int64_t proc);

// A run of indices that lie next to each other in one process's memory.
struct LocalRange {
  int64_t begin;  // relative to the first index asked for
  int64_t size;
  int64_t proc;
  int64_t local;  // index of the first element within the process's part
};

// The indices [offset, offset + size) of the axis as ranges, in ascending order, each as long as memory allows.
std::vector<LocalRange> LocalRanges(const Axis& axis, int64_t offset, int64_t size);

// Runs of two axes that describe the same indices, cut at the boundaries of both.
struct CommonRange {
  int64_t begin, size;
  int64_t proc[2], local[2];
};
std::vector<CommonRange> CommonRanges(const std::vector<LocalRange>& first, const std::vector<LocalRange>& second);

}  // namespace jaxmp::hostmp
