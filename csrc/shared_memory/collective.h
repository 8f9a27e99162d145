// Collectives of the devices of one machine's processes, through memory that they share.
//
// Each device writes what the others need of its operand to a block of its process's arena and comes to a process
// barrier, with the block as its token. Once all have come, each reads the others' blocks. A rank that does not come is
// an error of the barrier's, and nothing is read after it. Or the caller hands the tokens on, and nothing here waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/barrier/call_signature.h"
#include "csrc/base/status.h"

namespace jaxmp {

// z[i] = x[i] + y[i]; z may be x.
using Add = void (*)(void* z, const void* x, const void* y, size_t count);

// A call site. An operand of an all-gather is [outer, piece], its result [outer, ranks, piece]; a reduce-scatter takes
// [outer, ranks, piece] and gives [outer, piece], the sum of the ranks' in their order. With `picks`, operand and
// result are rows, and each rank's table lists the rows, by rank, that it takes.
struct SharedCollective {
  std::shared_ptr<const CallSignature> signature;
  std::vector<int64_t> ranks;  // by position in the mesh: the place in its group
  size_t outer = 1;
  bool sums = false, picks = false;
};

// How many of its rows each rank writes, by rank; and which of them this rank takes, `npicks` times (rank, first row,
// number of rows, first row in the result). Other rows of the result are left as they are.
struct Picks {
  const int32_t *written, *table;
  size_t npicks, row_bytes;
};

// Checks that the ranks of each group count from 0.
Status CheckCollective(const SharedCollective& call);

// `add` is of elements of `element_bytes`.
struct CollectiveArrays {
  const char* operand;
  size_t operand_bytes;
  char* result;
  size_t result_bytes;
  size_t element_bytes;
  Add add;
  Picks picks{};
};

// The device at `position` has come from `origin`; `done` is called as ArriveWithToken's is.
void RunCollective(const std::shared_ptr<const SharedCollective>& call, const Origin& origin, int64_t position,
                   const CollectiveArrays& arrays, std::function<void(const Status&)> done);

// The two halves, between which the caller brings every rank the tokens of all. The first needs the operand alone, and
// gives 0 where there is no memory; the second takes the tokens by rank, and the operand once more.
StatusOr<uint64_t> WriteOperand(const SharedCollective& call, int64_t position, const CollectiveArrays& arrays);
Status ReadOperands(const SharedCollective& call, int64_t position, const CollectiveArrays& arrays,
                    const uint64_t* tokens);

// The ranks in the group of the device at `position`; an error where there is no such position.
StatusOr<size_t> RanksOf(const SharedCollective& call, int64_t position);

}  // namespace jaxmp
