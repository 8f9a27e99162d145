// Everything that hostmp refuses. It is stricter than cuBLASMp: what the real header calls undefined or leaves
// unchecked is an error here, so that a plan that runs on the host asks only defined things of the real library.
#pragma once

#include <vector>

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/epilog_table.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// The arguments that Matmul and Matmul_bufferSize both take.
struct Arguments {
  abi::cublasMpHandle_t handle;
  abi::cublasMpMatmulDescriptor_t matmul;
  int64_t m, n, k;
  const void* alpha;
  const void* a;
  int64_t ia, ja;
  abi::cublasMpMatrixDescriptor_t desc_a;
  const void* b;
  int64_t ib, jb;
  abi::cublasMpMatrixDescriptor_t desc_b;
  const void* beta;
  const void* c;
  int64_t ic, jc;
  abi::cublasMpMatrixDescriptor_t desc_c;
  void* d;
  int64_t id, jd;
  abi::cublasMpMatrixDescriptor_t desc_d;
};

// Checks a matrix descriptor when it is made.
Status CheckMatrix(const abi::cublasMpMatrixDescriptor& desc);

// Fills `call` from one rank's arguments. Data pointers are checked only if `executes`, because the size query accepts
// any.
Status ReadCall(const Arguments& arguments, bool executes, MatmulCall* call);

// Checks the workspace given to Matmul against the size that the query returned.
Status CheckWorkspace(const MatmulCall& call, const void* device, size_t device_bytes);

// Checks that every rank asks for the same product. `calls` holds the ranks' calls, in order.
Status CheckAgreement(const std::vector<const MatmulCall*>& calls);

// ---- parts of ReadCall()

// Fills call->bias, aux, aux_ld, aux_type and gradient if the epilog has them.
Status ReadEpilog(const abi::cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call);

// Refuses attributes that hostmp would have to ignore.
Status CheckUnsupported(const abi::cublasMpMatmulDescriptor& desc, const MatmulCall& call);

// ---- products of 8 bits and fewer

// Checks the types of A, B and D, the compute type, and for fp8 and fp4 the transpositions.
Status CheckLowPrecisionTypes(const MatmulCall& call);

// Checks the types of a mixed pair: 8 bits or fewer with a wider operand. Only hostmp multiplies it, in any layout.
Status CheckMixedTypes(const MatmulCall& call);

// Checks the type of C if D is fp8 or fp4.
Status CheckLowPrecisionC(abi::cudaDataType_t c);

Status CheckLowPrecisionBias(const MatmulCall& call);
Status CheckLowPrecisionEpilog(const MatmulCall& call, const Epilog& epilog);

// Checks GELU's aux if D is fp8 (cuBLAS documentation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE; nvmath-python 1.0
// gives it the type of C).
Status CheckLowPrecisionAux(const MatmulCall& call, const Epilog& epilog);

// Fills call->scale_*, d_out_scale and amax_*, and checks them against the types and the layout.
Status ReadScales(const abi::cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call);

}  // namespace jaxmp::hostmp
