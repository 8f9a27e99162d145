// The part of validation that reads the matmul descriptor's attributes.
#ifndef JAXMP_HOSTMP_VALIDATE_EPILOG_H_
#define JAXMP_HOSTMP_VALIDATE_EPILOG_H_

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// Fills call->bias, aux, aux_ld, aux_type and gradient where the epilog has them.
Status ReadEpilog(const abi::cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call);

// Refuses attributes that hostmp would have to ignore.
Status CheckUnsupported(const abi::cublasMpMatmulDescriptor& desc, const MatmulCall& call);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_VALIDATE_EPILOG_H_
