// Without these a plan could tell the library another scale mode than its problem names, or leave a pointer unset that
// the library then reads: what each narrow problem sets, attribute by attribute, and how many scales it expects.
#include <cstring>
#include <map>

#include "csrc/plan/communicator.h"
#include "csrc/plan/plan.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp::tests {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using namespace abi;  // NOLINT: cuBLASMp's own names

std::map<int, int> modes;  // by attribute, of those that have 4 bytes
std::map<int, bool> pointers;

cublasMpStatus_t Record(cublasMpMatmulDescriptor_t desc, cublasMpMatmulDescriptorAttribute_t attribute,
                        const void* buffer, size_t size) {
  if (size == 4) std::memcpy(&modes[attribute], buffer, size);
  if (size == 8) pointers[attribute] = *static_cast<void* const*>(buffer) != nullptr;
  return host_api().MatmulDescriptorSetAttribute(desc, attribute, buffer, size);
}

Attributes Narrow(Attributes attributes, const char* dtype, const char* out) {
  attributes["trans_a"] = std::string("T");
  attributes["dtype_a"] = attributes["dtype_b"] = std::string(dtype);
  attributes["dtype_d"] = std::string(out);
  return attributes;
}

StatusOr<std::shared_ptr<Plan>> MakePlan(const Attributes& attributes) {
  static MpApi api = [] {
    MpApi recording = host_api();
    recording.MatmulDescriptorSetAttribute = Record;
    return recording;
  }();
  modes.clear();
  pointers.clear();
  StatusOr<Problem> problem = MakeProblem(attributes);
  if (!problem.ok()) return problem.status();
  return Plan::Make(api, *problem, GetCommunicator({problem->mesh_shape, problem->axes_row, problem->axes_col}));
}

// The modes of A, B, C, D, the aux and D's output scales; -1 where the attribute is not set.
std::string Modes() {
  std::string text;
  for (int attribute : {17, 19, 21, 23, 15, 26}) {
    const auto found = modes.find(attribute);
    text += (text.empty() ? "" : " ") + std::to_string(found == modes.end() ? -1 : found->second);
  }
  return text;
}
std::string Pointers() {
  std::string text;
  for (int attribute : {16, 18, 20, 22, 24, 13, 14, 25}) {
    const auto found = pointers.find(attribute);
    text += found == pointers.end() ? '-' : found->second ? '1' : '0';
  }
  return text;
}

std::string Refusal(const Attributes& attributes) {
  const auto plan = MakePlan(attributes);
  return plan.ok() ? "" : plan.status().message();
}

TEST(TestTensorwide) {
  Attributes attributes = Narrow(AllGather(2, 64, 64, 64), "f8e4m3", "f8e4m3");
  CHECK_EQ(Refusal(attributes), "");
  CHECK_EQ(Modes(), "-1 -1 -1 -1 -1 -1");
  CHECK_EQ(Pointers(), "--------");
  for (const char* name : {"scale_mode_a", "scale_mode_b", "scale_mode_d"})
    attributes[name] = std::string("scalar_fp32");
  attributes["amax_d"] = int64_t{1};
  const auto plan = MakePlan(attributes);
  CHECK(plan.ok());
  CHECK_EQ(Modes(), "0 0 -1 0 -1 -1");
  CHECK_EQ(Pointers(), "11-11---");
  CHECK_EQ((*plan)->distribution().scales.a, 1);
}

TEST(TestBlocks) {
  Attributes attributes = Narrow(AllGather(2, 256, 512, 256), "f8e4m3", "f8e4m3");
  attributes["scale_mode_a"] = attributes["scale_mode_b"] = std::string("vec32_ue8m0");
  attributes["d_out_scale_mode"] = std::string("vec32_ue8m0");
  auto plan = MakePlan(attributes);
  CHECK(plan.ok());
  CHECK_EQ(Modes(), "2 2 -1 -1 -1 2");
  CHECK_EQ(Pointers(), "11-----1");
  CHECK_EQ((*plan)->distribution().scales.a, 128 * 8);                     // a rank's 128 of m, 256 of k
  CHECK_EQ((*plan)->distribution().scales.b, 256 * 8);                     // 256 of n
  CHECK_EQ((*plan)->distribution().scales.d_out, 512 / 32 / 4 * 128 * 4);  // 128 rows of D in blocks of 32, 512 columns

  attributes = Narrow(ReduceScatter(2, 32, 64, 768), "f8e4m3", "bf16");
  attributes["scale_mode_a"] = std::string("blk128x128_fp32");
  attributes["scale_mode_b"] = std::string("vec128_fp32");
  plan = MakePlan(attributes);
  CHECK(plan.ok());
  CHECK_EQ(Modes(), "5 4 -1 -1 -1 -1");
  CHECK_EQ((*plan)->distribution().scales.a, 4);  // 3 blocks of k, rounded up to 4, for one block of m
  CHECK_EQ((*plan)->distribution().scales.b, 3 * 64);
}

// GELU_AUX of an fp8 D: the aux in fp8 with its scale and its largest value, or in 16 bits.
TEST(TestAux) {
  Attributes attributes = Narrow(AllGather(2, 64, 64, 64), "f8e4m3", "f8e4m3");
  attributes["epilog"] = int64_t{CUBLASMP_MATMUL_EPILOGUE_GELU_AUX};
  attributes["dtype_aux"] = std::string("f16");
  CHECK_EQ(Refusal(attributes), "");
  CHECK_EQ(modes[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE], int{CUDA_R_16F});
  attributes["dtype_aux"] = std::string("f8e4m3");
  attributes["scale_mode_aux"] = std::string("scalar_fp32");
  attributes["amax_aux"] = int64_t{1};
  const auto plan = MakePlan(attributes);
  CHECK(plan.ok());
  CHECK_EQ(Modes(), "-1 -1 -1 -1 0 -1");
  CHECK_EQ(Pointers(), "-----11-");
  CHECK_EQ(modes[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE], int{CUDA_R_8F_E4M3});
  CHECK_EQ((*plan)->distribution().scales.aux, 1);
  attributes["dtype_aux"] = std::string("f32");
  check::contains(Refusal(attributes), "the aux is f32 beside D of f8e4m3", __FILE__, __LINE__);
}

TEST(TestRefusals) {
  Attributes attributes = Local(32, 32, 32);
  attributes["scale_mode_a"] = std::string("scalar_fp32");
  check::contains(Refusal(attributes), "asks for scaling or an absolute maximum, which f32 does not take", __FILE__,
                  __LINE__);
  attributes["scale_mode_a"] = std::string("tensor");
  check::contains(Refusal(attributes), "scale_mode_a must be one of none, scalar_fp32", __FILE__, __LINE__);
  attributes = Narrow(Local(32, 32, 32), "f8e4m3", "f64");
  check::contains(Refusal(attributes), "D must be f16, bf16, f32, or f8e4m3", __FILE__, __LINE__);
}

}  // namespace
}  // namespace jaxmp::tests
