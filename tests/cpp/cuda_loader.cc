// Without these a machine with the wrong libraries would end in a missing symbol, or in memory that two NCCLs share.

#include "csrc/cuda/libraries.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_gpus.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using tests::Fake;

constexpr const char* kOther = "libm.so.6";  // a library, but none of ours

// Names of the loader's stay as they are.
std::string PathOf(const std::string& library) { return library == kOther ? library : Fake(library); }

std::string LoadError(const std::string& cublasmp, const std::string& nccl, const std::string& driver) {
  const Status status = cuda::Load(PathOf(cublasmp), PathOf(nccl), PathOf(driver));
  CHECK(status.ok() == (cuda::Loaded() != nullptr));
  return status.message();
}

constexpr const char *kMp = "right/libcublasmp.so.0", *kNccl = "right/libnccl.so.2", *kCuda = "right/libcuda.so.1";

std::string LoadErrorWith(const char* knob, const char* value) {
  setenv(knob, value, 1);
  const std::string error = LoadError(kMp, kNccl, kCuda);
  unsetenv(knob);
  return error;
}

// A program is compiled without the libraries, and needs them to run.
std::string CallError() {
  const auto instance = fake_xla::InstantiateOnCuda(tests::Local(4, 4, 4));
  CHECK_EQ(instance.error, "");
  return fake_xla::ExecuteOnCuda(*instance.site, 0, nullptr, {}, {});
}

TEST(NothingIsLoadedAtFirst) {
  CHECK_CONTAINS(cuda::cuda_api().status().message(), "cuBLASMp is not loaded in this process; call jaxmp.register()");
  CHECK_CONTAINS(CallError(), "cuBLASMp is not loaded");
}

TEST(WhatIsMissingIsNamed) {
  CHECK_CONTAINS(LoadError(kMp, kNccl, "none/libcuda.so.1"), "jaxmp: the CUDA driver cannot be opened as ");
  CHECK_CONTAINS(LoadError(kMp, kNccl, "none/libcuda.so.1"), "install NVIDIA's driver");
  CHECK_CONTAINS(LoadError(kMp, "none/libnccl.so.2", kCuda), "jaxmp: NCCL cannot be opened as ");
  CHECK_CONTAINS(LoadError("none/libcublasmp.so.0", kNccl, kCuda), "none/libcublasmp.so.0: cannot open shared object");
  CHECK_CONTAINS(LoadError("none/libcublasmp.so.0", kNccl, kCuda), "pip install --upgrade 'jaxmp[cuda13]'");
  CHECK_CONTAINS(LoadError(kMp, kNccl, kOther), "libm.so.6 has no cuInit, which the CUDA driver");
  CHECK_CONTAINS(LoadError(kMp, kOther, kCuda), "libm.so.6 has no ncclGetVersion, which NCCL 2.30 has");
  CHECK_CONTAINS(LoadError("lacking/libcublasmp.so.0", kNccl, kCuda), "has no cublasMpNumroc, which cuBLASMp 0.10 has");
}

TEST(WrongVersionsAreNamed) {
  CHECK_CONTAINS(LoadErrorWith("FAKE_NCCL_VERSION", "23006"),
                 "is NCCL 2.30.6, but cuBLASMp 0.10 needs 2.30.7 or newer");
  CHECK_CONTAINS(LoadErrorWith("FAKE_CUBLASMP_VERSION", "902"), "is cuBLASMp 0.9.2, but 0.10 is required");
  CHECK_CONTAINS(LoadErrorWith("FAKE_CUBLASMP_VERSION", "1100"), "is cuBLASMp 0.11.0, but 0.10 is required");
  CHECK_CONTAINS(LoadErrorWith("FAKE_CUBLASMP_VERSION", "10000"), "is cuBLASMp 1.0.0, but 0.10 is required");
}

TEST(ASecondNcclIsNamed) {
  const std::string error = LoadError(kMp, "second/libnccl_second.so.2", kCuda);
  CHECK_CONTAINS(error, "two NCCLs are in this process: ");
  CHECK_CONTAINS(error, "libnccl_second.so.2 was opened, but ");
  CHECK_CONTAINS(error, "right/libnccl.so.2; leave one of them");
  CHECK_EQ(cuda::cuda_api().status().message(), error);  // the last reason, if a program runs all the same
  CHECK_CONTAINS(CallError(), "two NCCLs");
}

TEST(WhatDoesNotFitItsRanksIsRefusedWithoutCuBlasMp) {
  CHECK_CONTAINS(fake_xla::InstantiateOnCuda(tests::AllGather(2, 5, 4, 4)).error,
                 "needs m to be a multiple of 2, got m=5");
}

TEST(TheFirstSuccessHolds) {
  CHECK_EQ(LoadErrorWith("FAKE_CUBLASMP_VERSION", "1005"), "");
  const cuda::Libraries* first = cuda::Loaded();
  if (!first) return;
  CHECK_EQ(LoadError("none", "none", "none"), "");
  CHECK(cuda::Loaded() == first);
  CHECK_EQ(first->info.at("cublasmp"), Fake(kMp));
  CHECK_EQ(first->info.at("cublasmp_version"), "0.10.5");
  CHECK_EQ(first->info.at("nccl"), Fake(kNccl));
  CHECK_EQ(first->info.at("nccl_version"), "2.30.7");
  CHECK_EQ(first->info.at("driver"), Fake(kCuda));
  CHECK_EQ(first->info.at("driver_version"), "13.0");
  CHECK(*cuda::cuda_api() == &first->cublasmp);
  CHECK_EQ(std::string(first->cublasmp.name), "cublasmp");
  CHECK(!first->cublasmp.fix_reduction_order);
}

}  // namespace
}  // namespace jaxmp
