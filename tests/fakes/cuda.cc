// A libcuda.so.1 with devices in host memory. A stream is a thread that works through a queue; a context is a device's
// number; functions that need a current context in the real driver check for one here.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/fakes/cuda_state.h"
#include "tests/fakes/job.h"

namespace fakes {
namespace {

CUctx_st contexts[kMostDevices];
thread_local std::vector<CUcontext> current;
std::atomic<bool> is_shut_down{false};

struct Streams {
  std::mutex mutex;
  std::set<CUstream> all;  // created and not destroyed
};

Streams& streams() {
  static auto* const only = new Streams;
  return *only;
}

struct Calls {
  std::mutex mutex;
  std::map<int, std::string> names;  // by device
};

Calls& calls() {
  static auto* const only = new Calls;
  return *only;
}

bool HasContext() { return Current() != nullptr; }

}  // namespace

Memory& memory() {
  static auto* const only = new Memory;
  return *only;
}

CUcontext Current() { return current.empty() ? nullptr : current.back(); }

void Note(CUcontext context, const char* name) {
  constexpr size_t kMost = 1 << 16;  // for programs that never ask for the log
  std::lock_guard<std::mutex> lock(calls().mutex);
  std::string& names = calls().names[context->ordinal];
  if (names.size() < kMost) names += std::string(name) + " ";
}

CUstream NewStream(CUcontext context) {
  auto* const stream = new CUstream_st(context);
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(stream);
  return stream;
}

void* Allocate(size_t bytes, int ordinal, bool is_host) {
  char* const made = Take(bytes);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[made] = {bytes, ordinal, is_host};
  return made;
}

bool Release(void* data) {
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto found = memory().blocks.find(static_cast<const char*>(data));
    if (found == memory().blocks.end()) return false;
    bytes = found->second.bytes;
    memory().blocks.erase(found);
  }
  GiveBack(static_cast<char*>(data), bytes);
  return true;
}

}  // namespace fakes

using namespace fakes;  // NOLINT

FAKE(cuInit);
FAKE(cuDriverGetVersion);
FAKE(cuGetErrorString);
FAKE(cuDeviceGetCount);
FAKE(cuDeviceGet);
FAKE(cuDevicePrimaryCtxRetain);
FAKE(cuCtxGetCurrent);
FAKE(cuCtxSetCurrent);
FAKE(cuCtxPushCurrent_v2);
FAKE(cuCtxPopCurrent_v2);
FAKE(cuCtxSynchronize);
FAKE(cuMemAlloc_v2);
FAKE(cuMemFree_v2);
FAKE(cuMemcpyDtoHAsync_v2);
FAKE(cuMemcpyHtoDAsync_v2);
FAKE(cuMemsetD8Async);
FAKE(cuStreamCreate);
FAKE(cuStreamDestroy_v2);
FAKE(cuStreamSynchronize);
FAKE(cuStreamWaitEvent);
FAKE(cuStreamGetCtx);
FAKE(cuEventCreate);
FAKE(cuEventRecord);
FAKE(cuEventQuery);

CUresult cuInit(unsigned int) { return fakes::Knob("FAKE_CUDA_DEVICES", 8) > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_INVALID_CONTEXT ? "invalid device context" : "fake error";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = fakes::Knob("FAKE_CUDA_DEVICES", 8);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kMostDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  contexts[device].ordinal = device;
  *context = &contexts[device];
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current.empty() ? nullptr : current.back();
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  if (current.empty()) current.push_back(nullptr);
  current.back() = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}
void fake_cuda_shut_down() { is_shut_down = true; }
int fake_cuda_ordinal() { return HasContext() ? current.back()->ordinal : -1; }

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  if (!HasContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *pointer = reinterpret_cast<CUdeviceptr>(Allocate(bytes, current.back()->ordinal, false));
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr pointer) {
  return Release(Pointer(pointer)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
const char* fake_cuda_log(int device) {
  static thread_local std::string taken;
  std::lock_guard<std::mutex> lock(calls().mutex);
  taken = std::exchange(calls().names[device], "");
  return taken.c_str();
}
bool fake_cuda_has(const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().blocks.find(static_cast<const char*>(data));
  return found != memory().blocks.end() && !found->second.is_host && found->second.bytes >= bytes;
}
int fake_cuda_allocations() {
  std::lock_guard<std::mutex> lock(memory().mutex);
  int count = 0;
  for (const auto& [data, block] : memory().blocks) count += !block.is_host;
  return count;
}
void* fake_cuda_share(size_t bytes) { return Allocate(bytes, 0, true); }
void fake_cuda_unshare(void* shared) { (void)Release(shared); }
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (!stream || !from) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "MemcpyDtoHAsync");
  stream->Put([=] { std::memcpy(to, Pointer(from), bytes); });
  return CUDA_SUCCESS;
}
// Copies at once, because pageable memory may be reused as soon as the call has returned.
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (!stream || !to) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "MemcpyHtoDAsync");
  const char* begin = static_cast<const char*>(from);
  stream->Put(
      [to, copy = std::vector<char>(begin, begin + bytes)] { std::memcpy(Pointer(to), copy.data(), copy.size()); });
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  if (!stream || (!to && bytes > 0)) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "MemsetD8Async");
  stream->Put([=] { std::memset(Pointer(to), value, bytes); });
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned int) {
  if (!HasContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = NewStream(current.back());
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream);
  }
  delete stream;
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "StreamSynchronize");
  return stream->Synchronize();
}
CUresult cuCtxSynchronize() {
  if (!HasContext()) return CUDA_ERROR_INVALID_CONTEXT;
  Note(current.back(), "CtxSynchronize");
  std::set<CUstream> there;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (CUstream stream : streams().all) {
      if (stream->context == current.back()) there.insert(stream);
    }
  }
  for (CUstream stream : there) {
    if (const CUresult result = stream->Synchronize(); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  if (!stream) return CUDA_ERROR_INVALID_VALUE;
  *context = stream->context;
  return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream stream, void (*work)(void*), void* data) {
  stream->Put([=] { work(data); });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned int) {
  if (!HasContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *event = new CUevent_st;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (!event || !stream) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "EventRecord");
  const auto mark = std::make_shared<CUevent_st::Mark>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->mark = mark;
  }
  stream->Put([mark] {
    std::lock_guard<std::mutex> lock(mark->mutex);
    mark->is_reached = true;
    mark->reached.notify_all();
  });
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
  if (is_shut_down) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (!HasContext()) return CUDA_ERROR_INVALID_CONTEXT;
  std::lock_guard<std::mutex> lock(event->mutex);
  if (!event->mark) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> inner(event->mark->mutex);
  return event->mark->is_reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  Note(stream->context, "StreamWaitEvent");
  std::shared_ptr<CUevent_st::Mark> mark;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    mark = event->mark;
  }
  if (!mark) return CUDA_SUCCESS;
  stream->Put([mark] {
    std::unique_lock<std::mutex> lock(mark->mutex);
    mark->reached.wait(lock, [&] { return mark->is_reached; });
  });
  return CUDA_SUCCESS;
}

// More functions that the real libcublasmp.so.0 needs to be opened; none of them works.
extern "C" {
CUresult cuCtxGetId(CUcontext, unsigned long long*) { return CUDA_ERROR_UNKNOWN; }  // NOLINT
CUresult cuMemGetAddressRange_v2(CUdeviceptr*, size_t*, CUdeviceptr) { return CUDA_ERROR_UNKNOWN; }
CUresult cuMemRelease(unsigned long long) { return CUDA_ERROR_UNKNOWN; }                         // NOLINT
CUresult cuMemRetainAllocationHandle(unsigned long long*, void*) { return CUDA_ERROR_UNKNOWN; }  // NOLINT
}

// For harnesses that copy without a stream.
extern "C" {
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  std::memcpy(Pointer(to), from, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  std::memcpy(to, Pointer(from), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
  std::memset(Pointer(to), value, bytes);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
}
