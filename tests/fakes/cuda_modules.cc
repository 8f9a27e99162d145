// Modules and kernels of the fake driver: PTX, which it interprets on the stream (ptx.h).
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "tests/fakes/cuda_state.h"
#include "tests/fakes/ptx.h"

#define API extern "C" __attribute__((visibility("default")))

namespace jaxmp::abi {

struct CUmod_st;
struct CUfunc_st;
using CUmodule = CUmod_st*;
using CUfunction = CUfunc_st*;

struct CUmod_st {
  std::shared_ptr<const fakes::ptx::Module> text;
  std::map<std::string, void*> globals;
  std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
  std::mutex mutex;  // of functions
};

struct CUfunc_st {
  CUmod_st* module;
  const fakes::ptx::Kernel* kernel;
};

}  // namespace jaxmp::abi

using namespace fakes;  // NOLINT

namespace {

constexpr auto kInvalidPtx = static_cast<CUresult>(218), kNotFound = static_cast<CUresult>(500);

// A copy of the arguments: they may be gone once the launch has returned.
std::vector<char> ParametersOf(const ptx::Kernel& kernel, void** arguments) {
  std::vector<char> parameters(kernel.parameter_bytes());
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    std::memcpy(&parameters[kernel.parameters[i].offset], arguments[i], kernel.parameters[i].bytes);
  }
  return parameters;
}

CUresult Launch(CUfunction function, const ptx::Extent& grid, const ptx::Extent& block, size_t shared_bytes,
                CUstream stream, void** arguments) {
  if (!stream || (!arguments && !function->kernel->parameters.empty())) return CUDA_ERROR_INVALID_VALUE;
  Note(stream->context, "LaunchKernel");
  stream->Put([=, parameters = ParametersOf(*function->kernel, arguments), text = function->module->text,
               globals = function->module->globals, kernel = function->kernel] {
    try {
      ptx::Run(*text, *kernel, grid, block, shared_bytes, parameters, globals);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "fake cuda: kernel %s: %s\n", kernel->name.c_str(), error.what());
      std::abort();  // a result that nobody computed must not go on
    }
  });
  return CUDA_SUCCESS;
}

}  // namespace

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (!Current()) return CUDA_ERROR_INVALID_CONTEXT;
  const char* const text = static_cast<const char*>(image);
  if (!std::strstr(text, ".version")) return CUDA_ERROR_UNKNOWN;
  auto made = std::make_unique<CUmod_st>();
  try {
    made->text = ptx::Parse(text);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fake cuda: PTX: %s\n", error.what());
    return kInvalidPtx;
  }
  for (const ptx::Variable& variable : made->text->globals) {
    const size_t bytes = std::max<size_t>(1, variable.bytes);
    void* const data = Allocate(bytes, Current()->ordinal, false);
    std::memset(data, 0, bytes);
    if (!variable.initial.empty()) std::memcpy(data, variable.initial.data(), variable.initial.size());
    made->globals[variable.name] = data;
  }
  *module = made.release();
  return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule module) {
  for (const auto& [name, data] : module->globals) (void)Release(data);
  delete module;
  return CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const auto found = module->text->kernels.find(name);
  if (found == module->text->kernels.end()) return kNotFound;
  std::lock_guard<std::mutex> lock(module->mutex);
  std::unique_ptr<CUfunc_st>& known = module->functions[name];
  if (!known) known = std::make_unique<CUfunc_st>(CUfunc_st{module, &found->second});
  *function = known.get();
  return CUDA_SUCCESS;
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr* pointer, size_t* bytes, CUmodule module, const char* name) {
  for (const ptx::Variable& variable : module->text->globals) {
    if (variable.name != name) continue;
    if (pointer) *pointer = reinterpret_cast<CUdeviceptr>(module->globals.at(name));
    if (bytes) *bytes = variable.bytes;
    return CUDA_SUCCESS;
  }
  return kNotFound;
}
API CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction) {
  *value = attribute == 0 ? 1024 : 0;  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, int, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, int) { return CUDA_SUCCESS; }

// As cuda.h has it, up to what is read here.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CUstream stream;
};
API CUresult cuLaunchKernelEx(const LaunchConfig* config, CUfunction function, void** arguments, void**) {
  return Launch(function, {config->grid_x, config->grid_y, config->grid_z},
                {config->block_x, config->block_y, config->block_z}, config->shared_bytes, config->stream, arguments);
}
