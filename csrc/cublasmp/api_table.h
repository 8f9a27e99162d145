// The table for calls of cuBLASMp, or of an implementation of the same calls.
#pragma once

#include "csrc/cublasmp/abi.h"

// Every function of the table, without its prefix: one list for the table, for a loader and for the ABI test.
#define JAXMP_CUBLASMP_FUNCTIONS(X) \
  X(GetVersion)                     \
  X(GetStatusString)                \
  X(Numroc)                         \
  X(Create)                         \
  X(Destroy)                        \
  X(SetStream)                      \
  X(GridCreate)                     \
  X(GridDestroy)                    \
  X(Malloc)                         \
  X(Free)                           \
  X(BufferRegister)                 \
  X(BufferDeregister)               \
  X(MatrixDescriptorCreate)         \
  X(MatrixDescriptorDestroy)        \
  X(MatmulDescriptorCreate)         \
  X(MatmulDescriptorDestroy)        \
  X(MatmulDescriptorSetAttribute)   \
  X(MatmulDescriptorGetAttribute)   \
  X(Matmul_bufferSize)              \
  X(Matmul)

namespace jaxmp {

// The forms that a library accepts beyond cuBLASMp's documented ones. Python asks before a call
// (jaxmp/_src/core/lowering/forms.py).
struct Capabilities {
  bool all_reduce_any_transposition = false;  // cuBLASMp: op(A) = Aᵀ, op(B) = B only
  bool grid_any_shape = false;                // cuBLASMp: contiguous shards need nprow == npcol
  bool grid_epilogs = false;                  // cuBLASMp: epilogs on 1-D layouts only
  bool complex_epilogs = false;               // cuBLASMp takes them from cuBLASLt, which has none
  bool fixed_reduction_order = false;         // MpApi::fix_reduction_order
  bool precise_gelu = false;                  // cuBLASMp's GELU has 5 digits, in float64 11
  bool as_documented = false;  // cuBLASMp 0.10: some results are wrong, jaxmp/_src/core/lowering/faults.py
};

inline constexpr Capabilities kHostCapabilities = {true, true, true, true, true, true, true};
inline constexpr char kCublasMp[] = "cublasmp";

struct MpApi {
  const char* name;
  // Sums every element of D in one order, fixed K blocks one after the other, so that it depends only on its row of
  // op(A) and its column of op(B); null if the library cannot. Called before the workspace is queried.
  abi::cublasMpStatus_t (*fix_reduction_order)(abi::cublasMpMatmulDescriptor_t matmul);
  // Why the last call on this thread did not return SUCCESS; "" if the library does not say.
  const char* (*last_error)();

#define JAXMP_DECLARE_FUNCTION(function) decltype(&abi::cublasMp##function) function;
  JAXMP_CUBLASMP_FUNCTIONS(JAXMP_DECLARE_FUNCTION)
#undef JAXMP_DECLARE_FUNCTION
};

// cuBLASMp's calls on host memory (hostmp/). The table lives as long as the process.
const MpApi& host_api();

}  // namespace jaxmp
