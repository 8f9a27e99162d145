// The functions of libcuda.so.1 that XLA:GPU calls and jaxmp does not: enough to start, to copy, and to run programs.
//
// Declared as in cuda.h of CUDA 13. The number of an enumerator stands next to its name.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "tests/fakes/cuda_state.h"

using namespace fakes;  // NOLINT

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotSupported = 801;  // CUresult

// An H200's values, by CUdevice_attribute; all others are 0.
const std::map<int, int>& Attributes() {
  static const std::map<int, int> attributes = {
      {1, 1024},        // MAX_THREADS_PER_BLOCK
      {2, 1024},        // MAX_BLOCK_DIM_X
      {3, 1024},        // MAX_BLOCK_DIM_Y
      {4, 64},          // MAX_BLOCK_DIM_Z
      {5, 2147483647},  // MAX_GRID_DIM_X
      {6, 65535},       // MAX_GRID_DIM_Y
      {7, 65535},       // MAX_GRID_DIM_Z
      {8, 49152},       // MAX_SHARED_MEMORY_PER_BLOCK
      {10, 32},         // WARP_SIZE
      {12, 65536},      // MAX_REGISTERS_PER_BLOCK
      {13, 1980000},    // CLOCK_RATE
      {16, 132},        // MULTIPROCESSOR_COUNT
      {19, 1},          // CAN_MAP_HOST_MEMORY
      {31, 1},          // CONCURRENT_KERNELS
      {32, 1},          // ECC_ENABLED
      {36, 3201000},    // MEMORY_CLOCK_RATE
      {37, 6144},       // GLOBAL_MEMORY_BUS_WIDTH
      {38, 62914560},   // L2_CACHE_SIZE
      {39, 2048},       // MAX_THREADS_PER_MULTIPROCESSOR
      {40, 3},          // ASYNC_ENGINE_COUNT
      {41, 1},          // UNIFIED_ADDRESSING
      {75, 9},          // COMPUTE_CAPABILITY_MAJOR
      {76, 0},          // COMPUTE_CAPABILITY_MINOR
      {78, 1},          // STREAM_PRIORITIES_SUPPORTED
      {81, 233472},     // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
      {82, 65536},      // MAX_REGISTERS_PER_MULTIPROCESSOR
      {97, 232448},     // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
      {106, 32},        // MAX_BLOCKS_PER_MULTIPROCESSOR
      {111, 1024},      // RESERVED_SHARED_MEMORY_PER_BLOCK
  };
  return attributes;
}

CUresult Copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (!stream || (bytes > 0 && (!to || !from))) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "MemcpyDtoDAsync");
  stream->Put([=] { std::memmove(Pointer(to), Pointer(from), bytes); });
  return CUDA_SUCCESS;
}

}  // namespace

// ---- devices

API CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  std::snprintf(name, static_cast<size_t>(size), "NVIDIA H200 (fake)");
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = kMemory;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  constexpr int kPciBusId = 33;
  const auto found = Attributes().find(attribute);
  *value = attribute == kPciBusId ? device + 1 : found == Attributes().end() ? 0 : found->second;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetPCIBusId(char* id, int size, CUdevice device) {
  std::snprintf(id, static_cast<size_t>(size), "0000:%02X:00.0", static_cast<unsigned>(device + 1));
  return CUDA_SUCCESS;
}
API CUresult cuDeviceCanAccessPeer(int* can, CUdevice one, CUdevice other) {
  *can = one != other;
  return CUDA_SUCCESS;
}

// ---- contexts

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* device) {
  if (!Current()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = Current()->ordinal;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
API CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) { return CUDA_SUCCESS; }

// ---- memory

API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (!Current()) return CUDA_ERROR_INVALID_CONTEXT;
  std::lock_guard<std::mutex> lock(memory().mutex);
  size_t used = 0;
  for (const auto& [data, block] : memory().blocks) {
    if (!block.is_host && block.ordinal == Current()->ordinal) used += block.bytes;
  }
  *total = kMemory;
  *free = kMemory - std::min(used, kMemory);
  return CUDA_SUCCESS;
}
API CUresult cuMemHostAlloc(void** data, size_t bytes, unsigned) {
  if (!Current()) return CUDA_ERROR_INVALID_CONTEXT;
  *data = Allocate(bytes, Current()->ordinal, true);
  return CUDA_SUCCESS;
}
API CUresult cuMemFreeHost(void* data) { return Release(data) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
API CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr pointer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().Find(Pointer(pointer));
  if (found == memory().blocks.end()) return CUDA_ERROR_INVALID_VALUE;
  const Block& block = found->second;
  constexpr unsigned kHost = 1, kDevice = 2;  // CU_MEMORYTYPE
  switch (attribute) {
    case 2:  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
      *static_cast<unsigned*>(data) = block.is_host ? kHost : kDevice;
      return CUDA_SUCCESS;
    case 9:  // DEVICE_ORDINAL
      *static_cast<int*>(data) = block.ordinal;
      return CUDA_SUCCESS;
    case 11:  // RANGE_START_ADDR
      *static_cast<const void**>(data) = found->first;
      return CUDA_SUCCESS;
    case 12:  // RANGE_SIZE
      *static_cast<size_t*>(data) = block.bytes;
      return CUDA_SUCCESS;
    default:
      return static_cast<CUresult>(kNotSupported);
  }
}
API CUresult cuPointerGetAttributes(unsigned count, const int* attributes, void** data, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; ++i) {
    std::memset(data[i], 0, sizeof(int));
    (void)cuPointerGetAttribute(data[i], attributes[i], pointer);
  }
  return CUDA_SUCCESS;
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Copy(to, from, bytes, stream);
}
API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  if (!stream || (!to && count > 0)) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "MemsetD32Async");
  stream->Put([=] { std::fill_n(static_cast<unsigned*>(Pointer(to)), count, value); });
  return CUDA_SUCCESS;
}

// ---- streams and events

API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  if (!Current()) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = NewStream(Current());
  return CUDA_SUCCESS;
}
API CUresult cuStreamQuery(CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_VALUE;
  return stream->IsIdle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API CUresult cuStreamIsCapturing(CUstream, int* status) {
  *status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  return CUDA_SUCCESS;
}
API CUresult cuEventDestroy_v2(CUevent event) {
  delete event;
  return CUDA_SUCCESS;
}
