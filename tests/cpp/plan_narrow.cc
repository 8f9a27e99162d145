// Without these a plan could tell the library another scale mode than its problem names, or leave a pointer unset that
// the library then reads: what each narrow problem sets, attribute by attribute, and how many scales it expects.

#include "csrc/plan/communicator.h"
#include "csrc/plan/plan.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp::tests {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using namespace abi;  // NOLINT: cuBLASMp's own names

std::map<int, int> modes;  // by attribute, if it has 4 bytes
std::map<int, bool> pointers;

cublasMpStatus_t Record(cublasMpMatmulDescriptor_t desc, cublasMpMatmulDescriptorAttribute_t attribute,
                        const void* buffer, size_t size) {
  if (size == 4) std::memcpy(&modes[attribute], buffer, size);
  if (size == 8) pointers[attribute] = *static_cast<void* const*>(buffer) != nullptr;
  return host_api().MatmulDescriptorSetAttribute(desc, attribute, buffer, size);
}

using S = std::string;

Attributes Narrow(const Attributes& attributes, const char* dtype, const char* out) {
  return With(attributes, {{"trans_a", S("T")}, {"dtype_a", S(dtype)}, {"dtype_b", S(dtype)}, {"dtype_d", S(out)}});
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

// The modes of A, B, C, D, the aux and D's output scales; -1 if the attribute is not set.
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

// How many scales of A, B, D and the aux a rank has.
std::array<int64_t, 4> Scales(const Plan& plan) {
  const auto& scales = plan.distribution().scales;
  return {scales.a, scales.b, scales.d_out, scales.aux};
}

TEST(TestAttributes) {
  const S e4m3 = "f8e4m3", scalar = "scalar_fp32", vec32 = "vec32_ue8m0";
  const Attributes plain = Narrow(AllGather(2, 64, 64, 64), "f8e4m3", "f8e4m3");
  const Attributes gelu = With(plain, {{"epilog", int64_t{CUBLASMP_MATMUL_EPILOGUE_GELU_AUX}}});
  const struct {
    Attributes attributes;
    const char *modes, *pointers;
    std::array<int64_t, 4> scales;
    int aux_type = -1;
  } cases[] = {
      {plain, "-1 -1 -1 -1 -1 -1", "--------", {0, 0, 0, 0}},
      {With(plain,
            {{"scale_mode_a", scalar}, {"scale_mode_b", scalar}, {"scale_mode_d", scalar}, {"amax_d", int64_t{1}}}),
       "0 0 -1 0 -1 -1",
       "11-11---",
       {1, 1, 0, 0}},
      // A rank's 128 of m and 256 of k; 256 of n; 128 rows of D in blocks of 32, 512 columns.
      {With(Narrow(AllGather(2, 256, 512, 256), "f8e4m3", "f8e4m3"),
            {{"scale_mode_a", vec32}, {"scale_mode_b", vec32}, {"d_out_scale_mode", vec32}}),
       "2 2 -1 -1 -1 2",
       "11-----1",
       {128 * 8, 256 * 8, 512 / 32 / 4 * 128 * 4, 0}},
      // 3 blocks of k, rounded up to 4, for one block of m.
      {With(Narrow(ReduceScatter(2, 32, 64, 768), "f8e4m3", "bf16"),
            {{"scale_mode_a", S("blk128x128_fp32")}, {"scale_mode_b", S("vec128_fp32")}}),
       "5 4 -1 -1 -1 -1",
       "11------",
       {4, 3 * 64, 0, 0}},
      // The aux of an fp8 D in 16 bits, or in fp8 with its scale and its largest value.
      {With(gelu, {{"dtype_aux", S("f16")}}), "-1 -1 -1 -1 -1 -1", "--------", {0, 0, 0, 0}, CUDA_R_16F},
      {With(gelu, {{"dtype_aux", e4m3}, {"scale_mode_aux", scalar}, {"amax_aux", int64_t{1}}}),
       "-1 -1 -1 -1 0 -1",
       "-----11-",
       {0, 0, 0, 1},
       CUDA_R_8F_E4M3}};
  for (const auto& x : cases) {
    const auto plan = MakePlan(x.attributes);
    CHECK_EQ(plan.status().message(), "");
    CHECK_EQ(Modes(), x.modes);
    CHECK_EQ(Pointers(), x.pointers);
    CHECK(Scales(**plan) == x.scales);
    const auto aux = modes.find(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE);
    CHECK_EQ(aux == modes.end() ? -1 : aux->second, x.aux_type);
  }
}

TEST(TestRefusals) {
  const Attributes local = Local(32, 32, 32), fp8 = Narrow(AllGather(2, 64, 64, 64), "f8e4m3", "f8e4m3");
  const std::pair<Attributes, const char*> cases[] = {
      {With(fp8, {{"epilog", int64_t{CUBLASMP_MATMUL_EPILOGUE_GELU_AUX}}, {"dtype_aux", S("f32")}}),
       "the aux is f32 beside D of f8e4m3"},
      {With(local, {{"scale_mode_a", S("scalar_fp32")}}),
       "asks for scaling or an absolute maximum, which f32 does not take"},
      {With(local, {{"scale_mode_a", S("tensor")}}), "scale_mode_a must be one of none, scalar_fp32"},
      {Narrow(local, "f8e4m3", "f64"), "D must be f16, bf16, f32, or f8e4m3"}};
  for (const auto& [attributes, says] : cases) CHECK_CONTAINS(MakePlan(attributes).status().message(), says);
}

}  // namespace
}  // namespace jaxmp::tests
