// The tiling of a product and its workspace: made in the first call of a plan and kept for later calls.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/handles/matmul_call.h"
#include "csrc/hostmp/tiling/tiling.h"

namespace jaxmp::hostmp {

// The workspace: each working thread owns an area, and the ranks of a call together provide one area for every thread
// of the machine.
struct Area {
  int64_t sums_bytes = 0;      // a tile of D in the accumulator's type
  int64_t scratch_bytes = 0;   // for the kernel
  int64_t boundary_bytes = 0;  // for copies of operands around the cuts of k, because a fixed order sums whole units
  int64_t gathered_bytes = 0;  // for copies of op(B)'s columns that several ranks hold
  int64_t bytes() const { return sums_bytes + scratch_bytes + boundary_bytes + gathered_bytes; }
};

// Chooses the kernel for a tile of `cols` columns. `is_one_matrix`: B is A.
KernelChoice KernelOf(const MatmulCall& call, int64_t cols, bool is_one_matrix);

// True if a tile is summed in D itself: D has the accumulator's type, C (which may be D) is not read after the sums,
// and one rank holds the tile in one piece.
bool SumsInD(const MatmulCall& call, const Tiling& tiling, const Tile& tile);

// Everything of a call that decides its tiling and workspace.
using TilingKey = std::array<int64_t, 47>;

struct ProductTiling {
  TilingKey key;
  Tiling tiling;
  Tiling symmetric;         // for A and B that are one matrix; no tiles if there is no such tiling
  Area area;                // large enough for both
  int64_t workspace_bytes;  // of each rank
};

// Returns the tiling of a valid call. The descriptor keeps it for the next call.
std::shared_ptr<const ProductTiling> TilingOf(const MatmulCall& call, abi::cublasMpMatmulDescriptor* desc);

}  // namespace jaxmp::hostmp
