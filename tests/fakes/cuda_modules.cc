// Modules and kernels of the fake driver: shared libraries that xla_gpu/bin/ptxas has made of XLA's PTX. Their threads
// run one after the other on the stream; threads of a block, or of a warp, wait for each other if the kernel says so.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tests/fakes/cuda_state.h"
#include "tests/fakes/kernel.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace fakes;  // NOLINT

namespace {

constexpr auto kNotFound = static_cast<CUresult>(500);

// Shared memory below 4 GiB, for kernels that keep its addresses in 32 bits.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes) {
#ifdef MAP_32BIT
    constexpr int kLow = MAP_32BIT;
#else
    constexpr int kLow = 0;
#endif
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | kLow, -1, 0);
    if (data_ == MAP_FAILED) std::abort();
  }
  ~SharedMemory() { munmap(data_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  const size_t bytes_;
  void* data_;
};

// Serves the waiting threads of a warp that are at one place of the code; `first` is the warp's first thread.
void Exchange(std::vector<Thread>& threads, size_t first) {
  const size_t end = std::min(first + kWarp, threads.size());
  std::optional<size_t> at;
  uint64_t given[kWarp], sum = 0;
  bool has_come[kWarp] = {};
  for (size_t i = first; i < end; ++i) {
    if (threads[i].waits != Wait::kWarp || at.value_or(threads[i].at) != threads[i].at) continue;
    at = threads[i].at;
    sum += given[i - first] = threads[i].value;
    has_come[i - first] = true;
  }
  for (size_t i = first; i < end; ++i) {
    if (!has_come[i - first]) continue;
    const int lane = threads[i].lane;
    if (lane == kSum) threads[i].value = sum;
    if (lane != kSum && has_come[lane]) threads[i].value = given[lane];
    threads[i].waits = Wait::kNothing;
  }
}

void RunBlock(const Kernel& kernel, unsigned position, unsigned count, const char* parameters, char* shared) {
  std::vector<Thread> threads(count);
  for (unsigned x = 0; x < count; ++x) {
    threads[x].x = x;
    threads[x].registers.resize(kernel.registers);
  }
  const auto count_of = [&threads](Wait wait) {
    return std::count_if(threads.begin(), threads.end(), [wait](const Thread& thread) { return thread.waits == wait; });
  };
  while (count_of(Wait::kEnd) < count) {
    for (Thread& thread : threads) {
      if (thread.waits == Wait::kNothing) thread.waits = kernel.run(thread, parameters, position, shared);
    }
    if (count_of(Wait::kWarp) > 0) {
      for (size_t first = 0; first < count; first += kWarp) Exchange(threads, first);
      continue;
    }
    for (Thread& thread : threads) {
      if (thread.waits == Wait::kBarrier) thread.waits = Wait::kNothing;
    }
  }
}

// An image does not say its length; it ends with the table of its sections.
size_t BytesOf(const void* image) {
  const auto& header = *static_cast<const Elf64_Ehdr*>(image);
  return header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
}

}  // namespace

// As in cuda.h, up to the last field that is read here.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CUstream stream;
};

API CUresult cuModuleLoadData(void** module, const void* image) {
  if (!Current()) return CUDA_ERROR_INVALID_CONTEXT;
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_UNKNOWN;
  char name[] = "/tmp/fake-cuda-XXXXXX";
  const int file = mkstemp(name);
  const size_t bytes = BytesOf(image);
  if (write(file, image, bytes) != static_cast<ssize_t>(bytes)) std::abort();
  close(file);
  *module = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  unlink(name);
  if (!*module) std::fprintf(stderr, "fake cuda: %s\n", dlerror());
  return *module ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
API CUresult cuModuleUnload(void*) { return CUDA_SUCCESS; }  // its kernels may still be on their way
API CUresult cuModuleGetFunction(const Kernel** kernel, void* module, const char* name) {
  *kernel = static_cast<const Kernel*>(dlsym(module, (std::string("kernel_") + name).c_str()));
  return *kernel ? CUDA_SUCCESS : kNotFound;
}
API CUresult cuModuleGetGlobal_v2(void** pointer, size_t* bytes, void* module, const char* name) {
  auto* const global = static_cast<Global*>(dlsym(module, (std::string("global_") + name).c_str()));
  if (!global) return kNotFound;
  if (!fake_cuda_has(global->data, global->bytes)) {  // still in the library, where no other process of a job reads it
    global->data = std::memcpy(Allocate(global->bytes, Current()->ordinal, false), global->data, global->bytes);
  }
  if (pointer) *pointer = global->data;
  if (bytes) *bytes = global->bytes;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, int attribute, const Kernel*) {
  *value = attribute == 0 ? 1024 : 0;  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(const Kernel*, int, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(const Kernel*, int) { return CUDA_SUCCESS; }

API CUresult cuLaunchKernelEx(const LaunchConfig* config, const Kernel* kernel, void** arguments, void**) {
  const LaunchConfig is = *config;
  const bool is_flat = is.grid_y * is.grid_z * is.block_y * is.block_z == 1;
  if (!is.stream || !is_flat) return CUDA_ERROR_INVALID_VALUE;
  Note(is.stream->context, "LaunchKernel");
  std::vector<char> parameters;  // copies: the arguments may be gone once the launch has returned
  for (size_t i = 0; i < kernel->parameters.size(); ++i) {
    const char* const begin = static_cast<const char*>(arguments[i]);
    parameters.insert(parameters.end(), begin, begin + kernel->parameters[i]);
    parameters.resize((parameters.size() + 15) / 16 * 16);
  }
  is.stream->Put([=] {
    const SharedMemory shared(kernel->shared_bytes + is.shared_bytes + 1);
    for (unsigned x = 0; x < is.grid_x; ++x) RunBlock(*kernel, x, is.block_x, parameters.data(), shared.data());
  });
  return CUDA_SUCCESS;
}
