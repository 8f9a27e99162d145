// A libcudart.so.13 over the fake driver, with what JAX's CUDA plugin asks of one. The real one takes private tables
// from the driver.
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
API int cudaDriverGetVersion(int* version) { return ::cuDriverGetVersion(version); }
API int cudaGetDeviceCount(int* count) { return ::cuDeviceGetCount(count); }
API int cudaGetDevice(int* device) {
  const int current = fake_cuda_ordinal();
  *device = current < 0 ? 0 : current;
  return kSuccess;
}
API int cudaSetDevice(int device) {
  CUcontext context = nullptr;
  const CUresult found = ::cuDevicePrimaryCtxRetain(&context, device);
  return found == CUDA_SUCCESS ? ::cuCtxSetCurrent(context) : found;
}
API int cudaGetLastError() { return kSuccess; }
API int cudaPeekAtLastError() { return kSuccess; }
API const char* cudaGetErrorString(int) { return "fake CUDA runtime error"; }
API const char* cudaGetErrorName(int) { return "cudaErrorFake"; }
// XLA asks for kernels of its own library; the fake driver has none to give, and none is launched.
API int cudaGetFuncBySymbol(void**, const void*) { return kNotSupported; }

// Kernels that are linked into a library announce themselves when it is opened.
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
