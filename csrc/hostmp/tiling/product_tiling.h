// The tiling of a product and the workspace that it takes: made once, with the first call of a plan, and shared by the
// ranks and by later calls.
#ifndef JAXMP_HOSTMP_TILING_PRODUCT_TILING_H_
#define JAXMP_HOSTMP_TILING_PRODUCT_TILING_H_

#include <array>
#include <cstdint>
#include <memory>

#include "csrc/hostmp/handles/matmul_call.h"
#include "csrc/hostmp/tiling/tiling.h"
#include "csrc/hostmp/tiling/workspace.h"

namespace jaxmp::hostmp {

// Everything of a call that a tiling and its workspace depend on.
using TilingKey = std::array<int64_t, 47>;

struct ProductTiling {
  TilingKey key;
  Tiling tiling;
  Area area;
  int64_t workspace_bytes;  // of each rank
};

// The tiling of a valid call. The descriptor keeps it for the next call.
std::shared_ptr<const ProductTiling> TilingOf(const MatmulCall& call, abi::cublasMpMatmulDescriptor* desc);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_TILING_PRODUCT_TILING_H_
