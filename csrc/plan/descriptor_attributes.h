// A problem's static facts, and a call's pointers, as attributes of cuBLASMp's matmul descriptor.
#ifndef JAXMP_PLAN_DESCRIPTOR_ATTRIBUTES_H_
#define JAXMP_PLAN_DESCRIPTOR_ATTRIBUTES_H_

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/plan/distribution.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp {

// One rank's operands and results; null where the problem has none.
struct Buffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  const void* bias = nullptr;
  const void* aux_input = nullptr;
  void* d = nullptr;
  void* aux = nullptr;
  void* gradient = nullptr;  // of the bias
  const void *scale_a = nullptr, *scale_b = nullptr, *scale_c = nullptr, *scale_d = nullptr, *scale_aux = nullptr;
  void *amax_d = nullptr, *amax_aux = nullptr, *d_out_scale = nullptr;
};

// Everything that does not change between calls.
Status SetAttributes(const MpApi& api, abi::cublasMpMatmulDescriptor_t matmul, const Problem& p,
                     const Distribution& layout);

Status SetPointers(const MpApi& api, abi::cublasMpMatmulDescriptor_t matmul, const Problem& p, const Buffers& buffers);

}  // namespace jaxmp

#endif  // JAXMP_PLAN_DESCRIPTOR_ATTRIBUTES_H_
