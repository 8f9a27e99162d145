// The work of one thread on one tile of D.
#pragma once

#include <vector>

#include "csrc/hostmp/handles/matmul_call.h"
#include "csrc/hostmp/tiling/product_tiling.h"

namespace jaxmp::hostmp {

// Everything that tiles need, fixed before the first tile runs.
struct DistributedProduct {
  std::vector<const MatmulCall*> calls;  // by rank
  bool is_one_matrix = false;            // D is symmetric
  // True if each tile is stored on both sides of the diagonal.
  bool is_mirrored() const {
    return is_one_matrix && calls[0]->epilog == abi::CUBLASMP_MATMUL_EPILOGUE_DEFAULT &&
           !calls[0]->tiling->symmetric.tiles.empty();
  }
  const Tiling& tiling() const { return is_mirrored() ? calls[0]->tiling->symmetric : calls[0]->tiling->tiling; }
  const Area& area() const { return calls[0]->tiling->area; }
};

// True if the product is X X^T: on every rank B is A.
bool IsOneMatrix(const std::vector<const MatmulCall*>& calls);

// Computes one tile. `workspace` is the thread's own area.
void RunTile(const DistributedProduct& product, const Tile& tile, char* workspace);

}  // namespace jaxmp::hostmp
