// The tiling of a product and the workspace that it takes: made with the first call of a plan, and kept for later
// calls.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/handles/matmul_call.h"
#include "csrc/hostmp/tiling/tiling.h"

namespace jaxmp::hostmp {

// Workspace: each thread at work owns an area, and a rank's workspace holds as many areas as it takes for the ranks
// of the call to provide one for every thread of the machine.
struct Area {
  int64_t sums_bytes = 0;      // a tile of D in the accumulator's type
  int64_t scratch_bytes = 0;   // for the kernel
  int64_t boundary_bytes = 0;  // for operands around the cuts of k, where a fixed order cannot be cut
  int64_t gathered_bytes = 0;  // for columns of op(B) that several ranks hold, put together
  int64_t bytes() const { return sums_bytes + scratch_bytes + boundary_bytes + gathered_bytes; }
};

// The kernel for a tile of so many columns, where B is A or is not.
KernelChoice KernelOf(const MatmulCall& call, int64_t cols, bool is_one_matrix);

// Whether a tile is summed in D itself: not where D is narrower, nor where C, which may be D, is still to be read, nor
// where several ranks hold it.
bool SumsInD(const MatmulCall& call, const Tiling& tiling, const Tile& tile);

// Everything of a call that a tiling and its workspace depend on.
using TilingKey = std::array<int64_t, 47>;

struct ProductTiling {
  TilingKey key;
  Tiling tiling;
  Tiling symmetric;         // for A and B that are one matrix; no tiles where there is no such tiling
  Area area;                // for both
  int64_t workspace_bytes;  // of each rank
};

// The tiling of a valid call. The descriptor keeps it for the next call.
std::shared_ptr<const ProductTiling> TilingOf(const MatmulCall& call, abi::cublasMpMatmulDescriptor* desc);

}  // namespace jaxmp::hostmp
