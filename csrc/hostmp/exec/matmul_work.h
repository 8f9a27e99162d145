// One rank's Matmul at the rendezvous.
#pragma once

#include <memory>
#include <vector>

#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

struct MatmulRank final : RankCall {
  MatmulCall call;

  StatusOr<std::unique_ptr<SharedWork>> Share(const std::vector<const RankCall*>& ranks) const override;
};

}  // namespace jaxmp::hostmp
