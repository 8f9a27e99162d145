// Everything that hostmp refuses. It is stricter than cuBLASMp: what the real header calls undefined, or leaves
// unchecked, is an error here, so that a plan that runs on the host asks nothing unheard-of of the real library.
#ifndef JAXMP_HOSTMP_VALIDATE_CALL_H_
#define JAXMP_HOSTMP_VALIDATE_CALL_H_

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// The arguments of Matmul_bufferSize, and those that Matmul shares with it.
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

// A matrix descriptor, when it is made.
Status CheckMatrix(const abi::cublasMpMatrixDescriptor& desc);

// Fills `call` from what one rank passed. Pointers to the data are judged only where `executes`: the size query takes
// any.
Status ReadCall(const Arguments& arguments, bool executes, MatmulCall* call);

// The workspace that Matmul was given against what the query names.
Status CheckWorkspace(const MatmulCall& call, const void* device, size_t device_bytes, const void* host);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_VALIDATE_CALL_H_
