#include <tuple>
#include <utility>

#include "csrc/cublasmp/status.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/plan.h"

namespace jaxmp {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

namespace {

struct Descriptor {
  const MpApi& api;
  cublasMpMatmulDescriptor_t matmul;

  template <typename Value>
  Status Set(cublasMpMatmulDescriptorAttribute_t attribute, const Value& value) const {
    return Check(api, api.MatmulDescriptorSetAttribute(matmul, attribute, &value, sizeof(value)),
                 "MatmulDescriptorSetAttribute");
  }
};

// Sets the communication options. One rank gets none: no source says what cuBLASLt makes of them.
Status SetHints(const Descriptor& to, const Problem& p) {
  if (p.nranks() == 1) return {};
  if (p.algorithm != Algorithm::kDefault) {
    JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE, NumberOf(p.algorithm)));
  }
  if (p.comm_sm_count != 0) {
    const auto count = static_cast<int32_t>(p.comm_sm_count);
    JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT, count));
  }
  if (p.communication_dtype == DType::kNone) return {};
  return to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE, NumberOf(p.communication_dtype));
}

Status SetScaleModes(const Descriptor& to, const Problem& p) {
  const std::pair<cublasMpMatmulDescriptorAttribute_t, ScaleMode> modes[] = {
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE, p.scale_mode_a},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE, p.scale_mode_b},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_MODE, p.scale_mode_c},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_MODE, p.scale_mode_d},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE, p.scale_mode_aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_MODE, p.d_out_scale_mode}};
  for (const auto& [attribute, mode] : modes) {
    if (mode != ScaleMode::kNone) JAXMP_RETURN_IF_ERROR(to.Set(attribute, NumberOf(mode)));
  }
  return {};
}

}  // namespace

Status SetAttributes(const MpApi& api, cublasMpMatmulDescriptor_t matmul, const Problem& p,
                     const Distribution& layout) {
  const Descriptor to = {api, matmul};
  if (p.fixed_reduction_order()) {
    JAXMP_RETURN_IF_ERROR(Check(api, api.fix_reduction_order(matmul), "fix_reduction_order"));
  }
  int32_t epilog = static_cast<int32_t>(p.epilog);
  if (p.pattern == Pattern::kAllReduce) epilog |= CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE;
  JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, NumberOf(p.trans_a)));
  JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, NumberOf(p.trans_b)));
  JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, epilog));
  JAXMP_RETURN_IF_ERROR(SetHints(to, p));
  if (p.needs_bias()) {
    JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE, NumberOf(p.dtype_bias)));
  }
  if (p.has_gradient()) {
    JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME, CUBLASMP_RESULT_SCHEME_FULL));
  }
  JAXMP_RETURN_IF_ERROR(SetScaleModes(to, p));
  if (!p.has_aux()) return {};
  if (p.dtype_aux != DType::kU8) {  // cuBLASMp refuses a type for the RELU mask, because it is fixed
    JAXMP_RETURN_IF_ERROR(to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE, NumberOf(p.dtype_aux)));
  }
  return to.Set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, layout.aux.attribute_ld);
}

Status SetPointers(const MpApi& api, cublasMpMatmulDescriptor_t matmul, const Problem& p, const Buffers& buffers) {
  const Descriptor to = {api, matmul};
  const auto has = [](ScaleMode mode) { return mode != ScaleMode::kNone; };
  const void* bias = p.has_gradient() ? buffers.gradient : buffers.bias;
  const void* aux = p.reads_aux() ? buffers.aux_input : buffers.aux;
  const std::tuple<cublasMpMatmulDescriptorAttribute_t, bool, const void*> pointers[] = {
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER, p.needs_bias(), bias},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, p.has_aux(), aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER, has(p.scale_mode_a), buffers.scale_a},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER, has(p.scale_mode_b), buffers.scale_b},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_POINTER, has(p.scale_mode_c), buffers.scale_c},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER, has(p.scale_mode_d), buffers.scale_d},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER, has(p.scale_mode_aux), buffers.scale_aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER, p.amax_d != 0, buffers.amax_d},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER, p.amax_aux != 0, buffers.amax_aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_POINTER, has(p.d_out_scale_mode), buffers.d_out_scale}};
  for (const auto& [attribute, is_used, pointer] : pointers) {
    if (is_used) JAXMP_RETURN_IF_ERROR(to.Set(attribute, pointer));
  }
  return {};
}

}  // namespace jaxmp
