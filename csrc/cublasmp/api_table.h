// The table through which everything above calls cuBLASMp, or an implementation of the same calls.
#pragma once

#include "csrc/cublasmp/abi.h"

// Every function of the table, without its prefix: one list for the table, for a loader and for the
// ABI test.
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

// What a library takes beyond cuBLASMp's documented forms. Python asks ahead of a call
// (jaxmp/_src/core/lowering/forms.py).
struct Capabilities {
  bool all_reduce_any_transposition = false;  // cuBLASMp: op(A) = Aᵀ, op(B) = B only
  bool grid_any_shape = false;                // cuBLASMp: contiguous shards need nprow == npcol
  bool grid_epilogs = false;                  // cuBLASMp: epilogs on 1-D layouts only
  bool complex_epilogs = false;               // cuBLASMp's are cuBLASLt's, which has none
  bool fixed_reduction_order = false;         // MpApi::fix_reduction_order
  bool precise_gelu = false;                  // cuBLASMp's has 5 digits, and 11 of float64
  bool as_documented = false;  // cuBLASMp 0.10: some results are wrong, jaxmp/_src/core/lowering/faults.py
};

inline constexpr Capabilities kHostCapabilities = {true, true, true, true, true, true, true};
inline constexpr char kCublasMp[] = "cublasmp";

struct MpApi {
  const char* name;
  // Has every element of D summed in one order, fixed K blocks one after the other, so that it depends on its row of
  // op(A) and its column of op(B) alone; null where the library cannot. To be called before the workspace is queried.
  abi::cublasMpStatus_t (*fix_reduction_order)(abi::cublasMpMatmulDescriptor_t matmul);
  // Why the last call on this thread did not return SUCCESS; "" where the library keeps that to
  // itself.
  const char* (*last_error)();

#define JAXMP_DECLARE_FUNCTION(function) decltype(&abi::cublasMp##function) function;
  JAXMP_CUBLASMP_FUNCTIONS(JAXMP_DECLARE_FUNCTION)
#undef JAXMP_DECLARE_FUNCTION
};

// cuBLASMp's calls on host memory (hostmp/). The table lives as long as the process.
const MpApi& host_api();

}  // namespace jaxmp
