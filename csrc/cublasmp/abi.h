// The part of cuBLASMp's C ABI that jaxmp calls, declared by us, so that no CUDA toolkit is needed to build.
//
// Names, numbers and parameter orders are as in cuBLASMp 0.10 and in the CUDA 13 headers that it includes;
// tests/project/test_abi.py compiles this file together with the real header and compares them. Everything is in a
// namespace, so that both can be included in one translation unit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace jaxmp::abi {

// CUDA, NCCL and cuBLAS.

struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct ncclComm;
using ncclComm_t = ncclComm*;

enum cudaDataType_t : int {
  CUDA_R_32F = 0,
  CUDA_R_64F = 1,
  CUDA_R_16F = 2,
  CUDA_R_8I = 3,
  CUDA_C_32F = 4,
  CUDA_C_64F = 5,
  CUDA_R_8U = 8,
  CUDA_R_32I = 10,
  CUDA_R_16BF = 14,
  CUDA_R_8F_E4M3 = 28,
  CUDA_R_8F_E5M2 = 29,
  CUDA_R_4F_E2M1 = 33,
};

enum cublasOperation_t : int { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };

enum cublasComputeType_t : int {
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_32F_PEDANTIC = 69,
  CUBLAS_COMPUTE_64F = 70,
  CUBLAS_COMPUTE_64F_PEDANTIC = 71,
  CUBLAS_COMPUTE_32I = 72,
  CUBLAS_COMPUTE_32F_FAST_16F = 74,
  CUBLAS_COMPUTE_32F_FAST_16BF = 75,
  CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
  CUBLAS_COMPUTE_32F_EMULATED_16BFX9 = 78,
  CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT = 79,
};

// cuBLASMp.

enum cublasMpStatus_t : int {
  CUBLASMP_STATUS_SUCCESS = 0,
  CUBLASMP_STATUS_NOT_INITIALIZED = 1,
  CUBLASMP_STATUS_ALLOCATION_FAILED = 2,
  CUBLASMP_STATUS_INVALID_VALUE = 3,
  CUBLASMP_STATUS_ARCHITECTURE_MISMATCH = 4,
  CUBLASMP_STATUS_EXECUTION_FAILED = 5,
  CUBLASMP_STATUS_INTERNAL_ERROR = 6,
  CUBLASMP_STATUS_NOT_SUPPORTED = 7,
};

enum cublasMpGridLayout_t : int { CUBLASMP_GRID_LAYOUT_COL_MAJOR = 0, CUBLASMP_GRID_LAYOUT_ROW_MAJOR = 1 };

enum cublasMpMatmulDescriptorAttribute_t : int {
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA = 0,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB = 1,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMPUTE_TYPE = 2,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE = 3,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT = 4,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE = 5,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER = 6,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_BATCH_STRIDE = 7,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE = 8,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER = 9,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD = 10,  // in bits for the RELU mask, in elements for GELU
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_BATCH_STRIDE = 11,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE = 12,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER = 13,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER = 14,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE = 15,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER = 16,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE = 17,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER = 18,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE = 19,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_POINTER = 20,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_MODE = 21,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER = 22,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_MODE = 23,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER = 24,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_POINTER = 25,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_MODE = 26,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE = 27,
  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME = 28,
};

enum cublasMpMatmulAlgoType_t : int {
  CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT = 0,
  CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P = 1,
  CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST = 2,
  CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P = 3,
  CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST = 4,
  CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP = 5,
  CUBLASMP_MATMUL_ALGO_TYPE_FUSED = 6,
};

enum cublasMpMatmulEpilogue_t : int {
  CUBLASMP_MATMUL_EPILOGUE_DEFAULT = 0,
  CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE = 1,  // a bit, which may be joined with others
  CUBLASMP_MATMUL_EPILOGUE_RELU = 2,
  CUBLASMP_MATMUL_EPILOGUE_RELU_AUX = 130,
  CUBLASMP_MATMUL_EPILOGUE_BIAS = 4,
  CUBLASMP_MATMUL_EPILOGUE_RELU_BIAS = 6,
  CUBLASMP_MATMUL_EPILOGUE_RELU_AUX_BIAS = 134,
  CUBLASMP_MATMUL_EPILOGUE_DRELU = 136,
  CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD = 152,
  CUBLASMP_MATMUL_EPILOGUE_GELU = 32,
  CUBLASMP_MATMUL_EPILOGUE_GELU_AUX = 160,
  CUBLASMP_MATMUL_EPILOGUE_GELU_BIAS = 36,
  CUBLASMP_MATMUL_EPILOGUE_GELU_AUX_BIAS = 164,
  CUBLASMP_MATMUL_EPILOGUE_DGELU = 192,
  CUBLASMP_MATMUL_EPILOGUE_DGELU_BGRAD = 208,
  CUBLASMP_MATMUL_EPILOGUE_BGRADA = 256,
  CUBLASMP_MATMUL_EPILOGUE_BGRADB = 512,
};

enum cublasMpMatmulMatrixScale_t : int {
  CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32 = 0,
  CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3 = 1,
  CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 = 2,
  CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32 = 3,
  CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32 = 4,
  CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32 = 5,
};

enum cublasMpResultScheme_t : int {
  CUBLASMP_RESULT_SCHEME_DEFAULT = 0,
  CUBLASMP_RESULT_SCHEME_PARTIAL = 1,
  CUBLASMP_RESULT_SCHEME_FULL = 2,
};

struct cublasMpHandle;
struct cublasMpGrid;
struct cublasMpMatrixDescriptor;
struct cublasMpMatmulDescriptor;
using cublasMpHandle_t = cublasMpHandle*;
using cublasMpGrid_t = cublasMpGrid*;
using cublasMpMatrixDescriptor_t = cublasMpMatrixDescriptor*;
using cublasMpMatmulDescriptor_t = cublasMpMatmulDescriptor*;

// The size in bytes that SetAttribute requires; 0 for a number that is no attribute.
constexpr size_t AttributeSize(int attribute) {
  switch (attribute) {
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMPUTE_TYPE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_MODE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_MODE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_MODE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE:
    case CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME:
      return 4;
    default:
      return attribute >= 0 && attribute <= CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME ? 8 : 0;
  }
}

// Declared only for their types: the table in api_table.h points to a library's functions.

cublasMpStatus_t cublasMpGetVersion(int* version);
const char* cublasMpGetStatusString(cublasMpStatus_t status);
int64_t cublasMpNumroc(int64_t n, int64_t nb, uint32_t iproc, uint32_t isrcproc, uint32_t nprocs);

cublasMpStatus_t cublasMpCreate(cublasMpHandle_t* handle, cudaStream_t stream);
cublasMpStatus_t cublasMpDestroy(cublasMpHandle_t handle);
cublasMpStatus_t cublasMpSetStream(cublasMpHandle_t handle, cudaStream_t stream);

cublasMpStatus_t cublasMpGridCreate(int64_t nprow, int64_t npcol, cublasMpGridLayout_t layout, ncclComm_t comm,
                                    cublasMpGrid_t* grid);
cublasMpStatus_t cublasMpGridDestroy(cublasMpGrid_t grid);

cublasMpStatus_t cublasMpMalloc(cublasMpGrid_t grid, void** ptr, size_t size);
cublasMpStatus_t cublasMpFree(cublasMpGrid_t grid, void* ptr);
cublasMpStatus_t cublasMpBufferRegister(cublasMpGrid_t grid, void* ptr, size_t size);
cublasMpStatus_t cublasMpBufferDeregister(cublasMpGrid_t grid, void* ptr);

cublasMpStatus_t cublasMpMatrixDescriptorCreate(int64_t m, int64_t n, int64_t mb, int64_t nb, int64_t rsrc,
                                                int64_t csrc, int64_t lld, cudaDataType_t type, cublasMpGrid_t grid,
                                                cublasMpMatrixDescriptor_t* desc);
cublasMpStatus_t cublasMpMatrixDescriptorDestroy(cublasMpMatrixDescriptor_t desc);

cublasMpStatus_t cublasMpMatmulDescriptorCreate(cublasMpMatmulDescriptor_t* matmulDesc,
                                                cublasComputeType_t computeType);
cublasMpStatus_t cublasMpMatmulDescriptorDestroy(cublasMpMatmulDescriptor_t matmulDesc);
cublasMpStatus_t cublasMpMatmulDescriptorSetAttribute(cublasMpMatmulDescriptor_t matmulDesc,
                                                      cublasMpMatmulDescriptorAttribute_t attr, const void* buf,
                                                      size_t sizeInBytes);
cublasMpStatus_t cublasMpMatmulDescriptorGetAttribute(cublasMpMatmulDescriptor_t matmulDesc,
                                                      cublasMpMatmulDescriptorAttribute_t attr, void* buf,
                                                      size_t sizeInBytes, size_t* sizeWritten);

cublasMpStatus_t cublasMpMatmul_bufferSize(cublasMpHandle_t handle, cublasMpMatmulDescriptor_t matmulDesc, int64_t m,
                                           int64_t n, int64_t k, const void* alpha, const void* a, int64_t ia,
                                           int64_t ja, cublasMpMatrixDescriptor_t descA, const void* b, int64_t ib,
                                           int64_t jb, cublasMpMatrixDescriptor_t descB, const void* beta,
                                           const void* c, int64_t ic, int64_t jc, cublasMpMatrixDescriptor_t descC,
                                           void* d, int64_t id, int64_t jd, cublasMpMatrixDescriptor_t descD,
                                           size_t* workspaceSizeInBytesOnDevice, size_t* workspaceSizeInBytesOnHost);
cublasMpStatus_t cublasMpMatmul(cublasMpHandle_t handle, cublasMpMatmulDescriptor_t matmulDesc, int64_t m, int64_t n,
                                int64_t k, const void* alpha, const void* a, int64_t ia, int64_t ja,
                                cublasMpMatrixDescriptor_t descA, const void* b, int64_t ib, int64_t jb,
                                cublasMpMatrixDescriptor_t descB, const void* beta, const void* c, int64_t ic,
                                int64_t jc, cublasMpMatrixDescriptor_t descC, void* d, int64_t id, int64_t jd,
                                cublasMpMatrixDescriptor_t descD, void* d_work, size_t workspaceSizeInBytesOnDevice,
                                void* h_work, size_t workspaceSizeInBytesOnHost);

// Messages of the library, on the thread that caused them; levels 0 (none), 1 (errors) to 5 (every call).
using cublasMpLoggerCallback_t = void (*)(int logLevel, const char* functionName, const char* message);
cublasMpStatus_t cublasMpLoggerSetCallback(cublasMpLoggerCallback_t callback);
cublasMpStatus_t cublasMpLoggerSetFile(FILE* file);  // null: no file, and nothing on stdout
cublasMpStatus_t cublasMpLoggerSetLevel(int level);

}  // namespace jaxmp::abi
