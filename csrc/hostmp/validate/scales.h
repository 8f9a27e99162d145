// What hostmp refuses of products of 8 bits and fewer: types, transpositions, alignment, and the modes of their scales.
#ifndef JAXMP_HOSTMP_VALIDATE_SCALES_H_
#define JAXMP_HOSTMP_VALIDATE_SCALES_H_

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/epilog_table.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// A's, B's and D's types, the compute type, and for fp8 and fp4 the transpositions.
Status CheckLowPrecisionTypes(const MatmulCall& call);

// The same of a mixed pair: an operand of 8 bits or fewer and a wider one. hostmp alone multiplies it, in any layout.
Status CheckMixedTypes(const MatmulCall& call);

// C where D is fp8 or fp4.
Status CheckLowPrecisionC(abi::cudaDataType_t c);

Status CheckLowPrecisionBias(const MatmulCall& call);
Status CheckLowPrecisionEpilog(const MatmulCall& call, const Epilog& epilog);

// GELU's aux where D is fp8 (cuBLAS documentation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE; nvmath-python 1.0 gives
// it the type of C).
Status CheckLowPrecisionAux(const MatmulCall& call, const Epilog& epilog);

// Fills call->scale_*, d_out_scale and amax_*, and checks them against the types and the layout.
Status ReadScales(const abi::cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_VALIDATE_SCALES_H_
