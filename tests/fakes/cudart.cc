// A libcudart.so.13 over the fake driver, with the functions that JAX's CUDA plugin calls. The real one takes private
// tables from the driver.
#include "tests/fakes/fake.h"

FAKE(cuDriverGetVersion);  // libcuda's
FAKE(cuDeviceGetCount);
FAKE(cuDevicePrimaryCtxRetain);
FAKE(cuCtxSetCurrent);

using namespace jaxmp::abi;  // NOLINT: the runtime's own names

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kVersion = 13000;
constexpr int kSuccess = 0, kNotSupported = 801;  // cudaError_t

}  // namespace

API int cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
API int cudaGetDeviceCount(int* count) { return ::cuDeviceGetCount(count); }
API int cudaPeekAtLastError() { return kSuccess; }

// Kernels that are linked into a library register themselves when it is opened.
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
