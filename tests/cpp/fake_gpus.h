// Fake devices, each with a context, stream and thread, as in XLA:GPU; calls on all of them at once.
#ifndef JAXMP_TESTS_FAKE_GPUS_H_
#define JAXMP_TESTS_FAKE_GPUS_H_

#include <dlfcn.h>

#include "csrc/cuda/libraries.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_xla.h"
#include "tests/cpp/problems.h"
#include "tests/cpp/world.h"
#include "tests/fakes/fake.h"

namespace jaxmp::tests {

inline std::string Fake(const std::string& file) { return check::environment("JAXMP_FAKES") + ("/" + file); }

inline Status LoadFakes() {
  return cuda::Load(Fake("right/libcublasmp.so.0"), Fake("right/libnccl.so.2"), Fake("right/libcuda.so.1"));
}

// Finds one of the fakes' own functions in the library that is loaded.
template <typename Function>
Function* FakeFunction(const char* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(dlopen(Fake(library).c_str(), RTLD_NOW | RTLD_LOCAL), name));
}

using fake_xla::F32;

struct Gpu {
  explicit Gpu(int ordinal) : ordinal(ordinal) {
    CHECK_EQ(driver().DevicePrimaryCtxRetain(&context, ordinal), abi::CUDA_SUCCESS);
    stream = NewStream();
  }
  ~Gpu() { (void)driver().StreamDestroy_v2(stream); }
  Gpu(const Gpu&) = delete;

  abi::CUstream NewStream() const {
    abi::CUstream made = nullptr;
    (void)driver().CtxPushCurrent_v2(context);
    CHECK_EQ(driver().StreamCreate(&made, abi::CU_STREAM_NON_BLOCKING), abi::CUDA_SUCCESS);
    abi::CUcontext popped = nullptr;
    (void)driver().CtxPopCurrent_v2(&popped);
    return made;
  }
  static const cuda::Driver& driver() { return cuda::Loaded()->driver; }

  const int ordinal;
  abi::CUcontext context = nullptr;
  abi::CUstream stream = nullptr;
};

// Runs work(i) for `count` devices, each on a thread of its own.
inline void OnEach(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

// Gives a fake device the id that a program has for this position, as jaxmp.register() does; other devices keep theirs.
inline void NameDevice(const Problem& problem, int32_t position, const Gpu& gpu) {
  static std::mutex mutex;
  static std::map<int, int64_t> ids;
  std::lock_guard<std::mutex> lock(mutex);
  ids[gpu.ordinal] = problem.devices[static_cast<size_t>(position)];
  cuda::SetDeviceIds(ids);
}

// Adds the argument of the position, if a call takes one.
inline void AddPosition(const Problem& problem, int32_t* position, const Gpu& gpu,
                        std::vector<fake_xla::Buffer>* args) {
  if (problem.nranks() == 1) return;
  if (problem.devices.empty()) return args->push_back({XLA_FFI_DataType_S32, {}, position});
  NameDevice(problem, *position, gpu);
}

// Runs one rank of a world on a device, up to the end of its stream; returns the call's error, or the stream's.
inline std::string RunRank(CudaSite& site, World& world, const Gpu& gpu, int32_t position, size_t rank) {
  std::vector<fake_xla::Buffer> args = {F32(world.a[rank]), F32(world.b[rank])};
  if (world.problem.has_c()) args.push_back(F32(world.d[rank]));
  AddPosition(world.problem, &position, gpu, &args);
  const std::string error = fake_xla::ExecuteOnCuda(site, gpu.ordinal, gpu.stream, args, {F32(world.d[rank])});
  if (!error.empty()) return error;
  const abi::CUresult waited = Gpu::driver().StreamSynchronize(gpu.stream);
  return waited == abi::CUDA_SUCCESS ? "" : "the stream failed with " + std::to_string(waited);
}

inline int32_t PositionOf(const CudaSite& site, int rank) {
  int32_t position = 0;
  while (site.communicator->Locate(position)->rank != rank) ++position;
  return position;
}

// Runs all ranks of group 0; rank r runs on gpus[r]. Returns the errors by rank.
inline std::vector<std::string> RunAll(CudaSite& site, World& world, const std::vector<const Gpu*>& gpus) {
  std::vector<std::string> errors(gpus.size());
  OnEach(static_cast<int>(gpus.size()), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    errors[r] = RunRank(site, world, *gpus[r], PositionOf(site, rank), r);
  });
  return errors;
}

inline std::vector<std::unique_ptr<Gpu>>& machine() {
  static auto* const gpus = new std::vector<std::unique_ptr<Gpu>>;
  return *gpus;
}

// Loads the fakes and makes eight devices.
inline void StartMachine() {
  CHECK_EQ(LoadFakes().message(), "");
  for (int i = 0; i < 8; ++i) machine().push_back(std::make_unique<Gpu>(i));
}

inline std::vector<const Gpu*> Gpus(const std::vector<size_t>& ordinals) {
  std::vector<const Gpu*> gpus;
  for (size_t ordinal : ordinals) gpus.push_back(machine()[ordinal].get());
  return gpus;
}

inline std::vector<const Gpu*> FirstGpus(int64_t count) {
  std::vector<const Gpu*> gpus;
  for (int64_t i = 0; i < count; ++i) gpus.push_back(machine()[static_cast<size_t>(i)].get());
  return gpus;
}

inline std::string CallsOn(int device) {
  static auto* const log = FakeFunction<decltype(fake_cublasmp_log)>("right/libcublasmp.so.0", "fake_cublasmp_log");
  return log(device);
}

// Makes the next such call of cuBLASMp on this device fail.
inline void FailNext(const char* call, int device, int status = abi::CUBLASMP_STATUS_INTERNAL_ERROR) {
  FakeFunction<decltype(fake_cublasmp_fail)>("right/libcublasmp.so.0", "fake_cublasmp_fail")(call, device, status);
}

inline Attributes OnDevices(Attributes attributes, const std::vector<int64_t>& devices) {
  return With(std::move(attributes), {{"devices", devices}});
}

inline fake_xla::InstanceOf<CudaSite> Make(const Attributes& attributes) {
  fake_xla::InstanceOf<CudaSite> instance = fake_xla::InstantiateOnCuda(attributes);
  CHECK_EQ(instance.error, "");
  return instance;
}

inline void RunRight(CudaSite& site, const std::vector<const Gpu*>& gpus, int salt = 0) {
  World world(site.plan->problem(), salt);
  for (const std::string& error : RunAll(site, world, gpus)) CHECK_EQ(error, "");
  if (!world.IsRight()) check::report(false, __FILE__, __LINE__, "wrong: " + *site.text);
}

}  // namespace jaxmp::tests

#endif  // JAXMP_TESTS_FAKE_GPUS_H_
