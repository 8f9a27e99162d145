// The part of the C ABIs of the CUDA driver and of NCCL that jaxmp calls, declared by us like cuBLASMp's.
//
// Names, numbers and parameters are as in CUDA 12 and 13 and in NCCL 2.30; tests/project/test_abi.py compares each with
// the real headers. A function with a version in its symbol (cuMemAlloc_v2) has it here too: a header would hide it.
#pragma once

#include <cstddef>

#include "csrc/cublasmp/abi.h"

// Every function that is looked up, without its prefix.
#define JAXMP_DRIVER_FUNCTIONS(X) \
  X(Init)                         \
  X(DriverGetVersion)             \
  X(GetErrorString)               \
  X(DeviceGetCount)               \
  X(DeviceGet)                    \
  X(DevicePrimaryCtxRetain)       \
  X(CtxGetCurrent)                \
  X(CtxSetCurrent)                \
  X(CtxPushCurrent_v2)            \
  X(CtxPopCurrent_v2)             \
  X(CtxSynchronize)               \
  X(MemAlloc_v2)                  \
  X(MemFree_v2)                   \
  X(MemcpyDtoHAsync_v2)           \
  X(MemcpyHtoDAsync_v2)           \
  X(MemsetD8Async)                \
  X(StreamCreate)                 \
  X(StreamDestroy_v2)             \
  X(StreamSynchronize)            \
  X(StreamWaitEvent)              \
  X(StreamGetCtx)                 \
  X(EventCreate)                  \
  X(EventRecord)                  \
  X(EventQuery)

#define JAXMP_NCCL_FUNCTIONS(X) \
  X(GetVersion)                 \
  X(GetErrorString)             \
  X(GetLastError)               \
  X(GetUniqueId)                \
  X(CommInitRank)               \
  X(CommDestroy)                \
  X(CommGetAsyncError)          \
  X(MemAlloc)                   \
  X(MemFree)                    \
  X(AllReduce)

namespace jaxmp::abi {

// The CUDA driver. A CUstream and a cudaStream_t are one thing.

enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_UNKNOWN = 999,
};

enum CUevent_flags : int { CU_EVENT_DEFAULT = 0, CU_EVENT_DISABLE_TIMING = 2 };
enum CUstream_flags : int { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 };

struct CUctx_st;
struct CUevent_st;
using CUcontext = CUctx_st*;
using CUevent = CUevent_st*;
using CUstream = cudaStream_t;
using CUdevice = int;
using CUdeviceptr = unsigned long long;  // NOLINT: the header's own type

CUresult cuInit(unsigned int Flags);
CUresult cuDriverGetVersion(int* driverVersion);
CUresult cuGetErrorString(CUresult error, const char** pStr);
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev);
CUresult cuCtxGetCurrent(CUcontext* pctx);
CUresult cuCtxSetCurrent(CUcontext ctx);
CUresult cuCtxPushCurrent_v2(CUcontext ctx);
CUresult cuCtxPopCurrent_v2(CUcontext* pctx);
CUresult cuCtxSynchronize();
CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize);
CUresult cuMemFree_v2(CUdeviceptr dptr);
CUresult cuMemcpyDtoHAsync_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, CUstream hStream);
CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream);
CUresult cuStreamCreate(CUstream* phStream, unsigned int Flags);
CUresult cuStreamDestroy_v2(CUstream hStream);
CUresult cuStreamSynchronize(CUstream hStream);
CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags);
CUresult cuStreamGetCtx(CUstream hStream, CUcontext* pctx);
CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags);
CUresult cuEventRecord(CUevent hEvent, CUstream hStream);
CUresult cuEventQuery(CUevent hEvent);

// NCCL.

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t : int { ncclInt64 = 4, ncclFloat32 = 7 };
enum ncclRedOp_t : int { ncclSum = 0, ncclMax = 2 };

struct ncclUniqueId {
  char internal[128];
};

ncclResult_t ncclGetVersion(int* version);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
ncclResult_t ncclMemAlloc(void** ptr, size_t size);
ncclResult_t ncclMemFree(void* ptr);
ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);

}  // namespace jaxmp::abi
