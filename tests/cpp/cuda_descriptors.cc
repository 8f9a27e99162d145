// Without this a wrong attribute would be found only on a GPU. The real cuBLASMp can be opened without one, over the
// fake driver, and checks the attributes of a matmul descriptor; products need more. Skipped unless JAXMP_CUDA_WHEELS
// names the folder `nvidia` where pip has installed nvidia-cublasmp-cu13, nvidia-nccl-cu13 and nvidia-cublas.
#include <initializer_list>

#include "csrc/cuda/libraries.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/plan.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_gpus.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using S = std::string;
using I = int64_t;

TEST(TheRealLibraryOpens) {
  const char* wheels = std::getenv("JAXMP_CUDA_WHEELS");
  if (!wheels) check::skip("JAXMP_CUDA_WHEELS is not set");
  const std::string nvidia = wheels;
  const Status loaded = cuda::Load(nvidia + "/cublasmp/cu13/lib/libcublasmp.so.0", nvidia + "/nccl/lib/libnccl.so.2",
                                   tests::Fake("right/libcuda.so.1"));
  CHECK_EQ(loaded.message(), "");
  if (!cuda::Loaded()) std::exit(1);
}

struct Descriptor {
  explicit Descriptor(Compute compute) {
    CHECK_EQ(api().MatmulDescriptorCreate(&object, NumberOf(compute)), abi::CUBLASMP_STATUS_SUCCESS);
  }
  ~Descriptor() { CHECK_EQ(api().MatmulDescriptorDestroy(object), abi::CUBLASMP_STATUS_SUCCESS); }
  Descriptor(const Descriptor&) = delete;

  static const MpApi& api() { return **cuda::cuda_api(); }

  abi::cublasMpMatmulDescriptor_t object = nullptr;
};

void CheckAccepted(Attributes attributes, std::initializer_list<std::pair<const char*, Attribute>> changes) {
  for (const auto& [name, value] : changes) attributes[name] = value;
  const StatusOr<Problem> problem = MakeProblem(attributes);
  CHECK_EQ(problem.status().message(), "");
  const StatusOr<Distribution> layout = MakeDistribution(*problem);
  CHECK_EQ(layout.status().message(), "");
  const Descriptor descriptor(problem->compute);
  CHECK_EQ(SetAttributes(descriptor.api(), descriptor.object, *problem, *layout).message(), "");
  char some[16];
  Buffers buffers;
  buffers.bias = buffers.aux_input = buffers.scale_a = buffers.scale_b = buffers.scale_c = buffers.scale_d =
      buffers.scale_aux = some;
  buffers.aux = buffers.gradient = buffers.amax_d = buffers.amax_aux = buffers.d_out_scale = some;
  CHECK_EQ(SetPointers(descriptor.api(), descriptor.object, *problem, buffers).message(), "");
  int32_t epilog = -1;
  size_t written = 0;
  CHECK_EQ(
      descriptor.api().MatmulDescriptorGetAttribute(
          descriptor.object, abi::CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, &epilog, sizeof(epilog), &written),
      abi::CUBLASMP_STATUS_SUCCESS);
  const int32_t all_reduce = problem->pattern == Pattern::kAllReduce ? abi::CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE : 0;
  CHECK_EQ(epilog, static_cast<int32_t>(problem->epilog) | all_reduce);
  CHECK_EQ(written, sizeof(epilog));
}

TEST(EveryAttributeIsAccepted) {
  for (const Attributes& base : {tests::Local(64, 64, 64), tests::AllGather(2, 64, 64, 64),
                                 tests::ReduceScatter(2, 64, 64, 64), tests::AllReduce(2, 64, 64, 64)}) {
    CheckAccepted(base, {});
    for (const I epilog : {2, 32}) CheckAccepted(base, {{"epilog", epilog}});
    for (const I epilog : {4, 6, 36, 256, 512}) CheckAccepted(base, {{"epilog", epilog}, {"dtype_bias", S("f32")}});
    for (const I epilog : {130, 136}) CheckAccepted(base, {{"epilog", epilog}, {"dtype_aux", S("u8")}});
    for (const I epilog : {134, 152}) {
      CheckAccepted(base, {{"epilog", epilog}, {"dtype_aux", S("u8")}, {"dtype_bias", S("f32")}});
    }
    for (const I epilog : {160, 192}) CheckAccepted(base, {{"epilog", epilog}, {"dtype_aux", S("f32")}});
    for (const I epilog : {164, 208}) {
      CheckAccepted(base, {{"epilog", epilog}, {"dtype_aux", S("f32")}, {"dtype_bias", S("f32")}});
    }
    for (const char* compute : {"32F", "32F_PEDANTIC", "32F_FAST_TF32", "32F_FAST_16BF", "32F_FAST_16F",
                                "32F_EMULATED_16BFX9", "64F", "64F_PEDANTIC", "64F_EMULATED_FIXEDPOINT", "32I"}) {
      CheckAccepted(base, {{"compute", S(compute)}});
    }
    for (const char* algorithm :
         {"split_p2p", "split_multicast", "atomic_p2p", "atomic_multicast", "no_overlap", "fused"}) {
      CheckAccepted(base, {{"algorithm", S(algorithm)}, {"comm_sm_count", I{4}}});
    }
    for (const char* dtype : {"f32", "bf16", "f16"}) CheckAccepted(base, {{"communication_dtype", S(dtype)}});
    for (const char* mode :
         {"scalar_fp32", "vec16_ue4m3", "vec32_ue8m0", "outer_vec_fp32", "vec128_fp32", "blk128x128_fp32"}) {
      CheckAccepted(base, {{"dtype_a", S("f8e4m3")},
                           {"dtype_b", S("f8e4m3")},
                           {"dtype_d", S("f8e4m3")},
                           {"scale_mode_a", S(mode)},
                           {"scale_mode_b", S(mode)},
                           {"scale_mode_d", S("scalar_fp32")},
                           {"d_out_scale_mode", S(mode)},
                           {"amax_d", I{1}}});
    }
    CheckAccepted(base, {{"dtype_a", S("f8e4m3")},
                         {"dtype_b", S("f8e4m3")},
                         {"dtype_d", S("f8e4m3")},
                         {"dtype_aux", S("f8e4m3")},
                         {"epilog", I{160}},
                         {"scale_mode_d", S("scalar_fp32")},
                         {"scale_mode_aux", S("scalar_fp32")},
                         {"amax_aux", I{1}}});
  }
}

TEST(NumrocIsOurs) {
  for (int64_t n = 0; n < 40; ++n) {
    for (int64_t block = 1; block < 7; ++block) {
      for (uint32_t nprocs = 1; nprocs < 5; ++nprocs) {
        for (uint32_t at = 0; at < nprocs * nprocs; ++at) {
          CHECK_EQ(Descriptor::api().Numroc(n, block, at / nprocs, at % nprocs, nprocs),
                   host_api().Numroc(n, block, at / nprocs, at % nprocs, nprocs));
        }
      }
    }
  }
}

TEST(ErrorsReachTheMessage) {
  const Descriptor descriptor(Compute::k32F);
  (void)cuda::TakeLog();
  const int64_t wrong = 0;
  CHECK_EQ(descriptor.api().MatmulDescriptorSetAttribute(
               descriptor.object, abi::CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, &wrong, sizeof(wrong)),
           abi::CUBLASMP_STATUS_INVALID_VALUE);
  CHECK_EQ(std::string(cuda::TakeLastError()),
           "[cublasMpMatmulDescriptorSetAttribute] Invalid value: attribute size (8) must equal 4");
  CHECK_EQ(cuda::TakeLog().size(), size_t{1});
}

}  // namespace
}  // namespace jaxmp
