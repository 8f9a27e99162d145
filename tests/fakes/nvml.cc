// A libnvidia-ml.so.1 that counts the fake GPUs and names them: without it JAX sees none.
#include <cstdint>
#include <cstdio>

#include "tests/fakes/fake.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 2;  // nvmlReturn_t

unsigned Count() { return static_cast<unsigned>(fakes::Knob("FAKE_CUDA_DEVICES", 64)); }

}  // namespace

API int nvmlInit_v2() { return kSuccess; }
API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.65.06");
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
API int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 5;
  return kSuccess;
}
API int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* width) {
  *width = 16;
  return kSuccess;
}
