// A libnvidia-ml.so.1 that counts the fake GPUs and names them: without it JAX sees none.
#include <cstdint>
#include <cstdio>

#include "tests/fakes/fake.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 2;  // nvmlReturn_t

unsigned Count() { return static_cast<unsigned>(fakes::Knob("FAKE_CUDA_DEVICES", 64)); }
unsigned IndexOf(const void* device) { return static_cast<unsigned>(reinterpret_cast<uintptr_t>(device) - 1); }

}  // namespace

API int nvmlInit_v2() { return kSuccess; }
API int nvmlShutdown() { return kSuccess; }
API const char* nvmlErrorString(int) { return "fake NVML error"; }
API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.65.06");
  return kSuccess;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = Count();
  return kSuccess;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= Count()) return kInvalidArgument;
  *device = reinterpret_cast<void*>(uintptr_t{index} + 1);
  return kSuccess;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  unsigned domain = 0, bus = 0;
  if (std::sscanf(id, "%x:%x", &domain, &bus) != 2 || bus == 0) return kInvalidArgument;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}
API int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = IndexOf(device);
  return kSuccess;
}
API int nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::snprintf(text, size, "NVIDIA H200 (fake)");
  return kSuccess;
}
API int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return kSuccess;
}
API int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 5;
  return kSuccess;
}
API int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* width) {
  *width = 16;
  return kSuccess;
}
API int nvmlDeviceGetPcieSpeed(void*, unsigned* speed) {
  *speed = 32000;
  return kSuccess;
}
API int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  std::snprintf(text, size, "GPU-66616b65-2067-7075-0000-0000000000%02x", IndexOf(device) + 1);
  return kSuccess;
}
