// The work of one thread on one tile of D.
#pragma once

#include <vector>

#include "csrc/hostmp/handles/matmul_call.h"
#include "csrc/hostmp/tiling/product_tiling.h"

namespace jaxmp::hostmp {

// Everything a tile needs, fixed before the first one runs.
struct DistributedProduct {
  std::vector<const MatmulCall*> calls;  // by rank
  const Tiling& tiling() const { return calls[0]->tiling->tiling; }
  const Area& area() const { return calls[0]->tiling->area; }
};

// `workspace` is the thread's own area.
void RunTile(const DistributedProduct& product, const Tile& tile, char* workspace);

}  // namespace jaxmp::hostmp
