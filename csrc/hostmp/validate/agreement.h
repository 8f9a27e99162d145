// What the ranks of one product have to agree on.
#ifndef JAXMP_HOSTMP_VALIDATE_AGREEMENT_H_
#define JAXMP_HOSTMP_VALIDATE_AGREEMENT_H_

#include <vector>

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// Every rank must have asked for the same product. `calls` holds one call of each rank, in order.
Status CheckAgreement(const std::vector<const MatmulCall*>& calls);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_VALIDATE_AGREEMENT_H_
