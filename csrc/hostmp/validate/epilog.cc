#include <algorithm>

#include "csrc/base/limits.h"
#include "csrc/base/status.h"
#include "csrc/hostmp/handles/epilog_table.h"
#include "csrc/hostmp/validate/validate.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

// Checks the attributes of the bias or of its gradient: cuBLASMp has one set for both.
Status CheckBiasAttributes(const cublasMpMatmulDescriptor& desc, MatmulCall* call) {
  constexpr int kType = CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE;
  call->bias_type = desc.is_set[kType] ? AttributeOf<cudaDataType_t>(desc, kType) : call->d.desc.type;
  if (call->is_low_precision() && !call->scales_integers()) {
    JAXMP_RETURN_IF_ERROR(CheckLowPrecisionBias(*call));
  } else if (call->bias_type != call->d.desc.type) {
    return Unimplemented("the bias is ", NameOf(call->bias_type), " and D is ", NameOf(call->d.desc.type),
                         "; they must be of one type");
  }
  if (AttributeOf<int64_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_BATCH_STRIDE) != 0) {
    return InvalidArgument("BIAS_BATCH_STRIDE must be 0");
  }
  return {};
}

Status CheckBias(const cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call) {
  JAXMP_RETURN_IF_ERROR(CheckBiasAttributes(desc, call));
  call->bias = AttributeOf<const void*>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER);
  const bool is_needed = executes && call->d.local_rows() > 0;
  if (is_needed && !call->bias) return InvalidArgument("the epilog has a bias but BIAS_POINTER is not set");
  return {};
}

Status CheckGradient(const cublasMpMatmulDescriptor& desc, bool executes, const Epilog& epilog, MatmulCall* call) {
  JAXMP_RETURN_IF_ERROR(CheckBiasAttributes(desc, call));
  if (epilog.gradient == Gradient::kA && call->trans_a != CUBLAS_OP_N) {
    return Unimplemented("epilog BGRADA needs TRANSA=N; store A as (m, k)");
  }
  if (epilog.gradient == Gradient::kB && call->trans_b != CUBLAS_OP_T) {
    return Unimplemented("epilog BGRADB needs TRANSB=T; store B as (n, k)");
  }
  const auto scheme =
      AttributeOf<cublasMpResultScheme_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME);
  if (scheme != CUBLASMP_RESULT_SCHEME_FULL) {
    return Unimplemented("BIAS_RESULT_SCHEME is ", static_cast<int>(scheme), ", but hostmp gives every rank the ",
                         "complete sum; set it to CUBLASMP_RESULT_SCHEME_FULL");
  }
  call->gradient = AttributeOf<void*>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER);
  const int64_t size = epilog.gradient == Gradient::kB ? call->n : call->d.local_rows();
  if (executes && size > 0 && !call->gradient) {
    return InvalidArgument("the epilog has a bias gradient but BIAS_POINTER is not set");
  }
  return {};
}

Status CheckAuxType(const cublasMpMatmulDescriptor& desc, bool is_mask, const Epilog& epilog, MatmulCall* call) {
  constexpr int kType = CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE;
  if (is_mask && desc.is_set[kType]) {
    return InvalidArgument("EPILOGUE_AUX_DATA_TYPE is set, but the aux of RELU is a bit mask; leave it unset");
  }
  if (is_mask) return {};
  const cudaDataType_t d = call->d.desc.type;
  call->aux_type = desc.is_set[kType] ? AttributeOf<cudaDataType_t>(desc, kType) : d;
  if (IsFloat8(d)) return CheckLowPrecisionAux(*call, epilog);
  if (call->aux_type == d) return {};
  return Unimplemented("the aux is ", NameOf(call->aux_type), " and D is ", NameOf(d), "; they must be of one type");
}

Status CheckAux(const cublasMpMatmulDescriptor& desc, bool executes, const Epilog& epilog, MatmulCall* call) {
  const bool is_mask = epilog.activation == Activation::kRelu;
  JAXMP_RETURN_IF_ERROR(CheckAuxType(desc, is_mask, epilog, call));
  if (AttributeOf<int64_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_BATCH_STRIDE) != 0) {
    return InvalidArgument("EPILOGUE_AUX_BATCH_STRIDE must be 0");
  }
  call->aux_ld = AttributeOf<int64_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD);
  const int64_t unit = is_mask ? 128 : 8;
  const int64_t rows = call->d.local_rows();
  if (call->aux_ld < rows || call->aux_ld % unit != 0) {
    return InvalidArgument("EPILOGUE_AUX_LD must be a multiple of ", unit, " and at least the ", rows,
                           " local rows of D, got ", call->aux_ld);
  }
  if (!Fits(std::max<int64_t>(1, call->d.local_cols()), call->aux_ld, kMostAuxElements)) {
    return Unimplemented("EPILOGUE_AUX_LD is ", call->aux_ld, ", which makes an aux of more than 2^52 elements");
  }
  const Axis& axis = call->d.desc.rows;
  if (is_mask && axis.nprocs > 1 && axis.block < axis.extent && axis.block % 8 != 0 &&
      axis.block * axis.nprocs < axis.extent) {
    return Unimplemented("a RELU mask of a block-cyclic D needs mbD to be a multiple of 8, got ", axis.block);
  }
  call->aux = AttributeOf<void*>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER);
  if (executes && rows > 0 && !call->aux) {
    return InvalidArgument("the epilog has an aux ", epilog.is_derivative ? "input" : "output",
                           " but EPILOGUE_AUX_POINTER is not set");
  }
  return {};
}

}  // namespace

Status ReadEpilog(const cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call) {
  const Epilog* epilog = FindEpilog(call->epilog);
  if (!epilog) return Unimplemented("epilog ", call->epilog, " is not among the epilogs of hostmp");
  if (epilog->activation != Activation::kNone && Facts(call->d.desc.type).is_complex) {
    return Unimplemented("epilog ", epilog->name, " has no meaning for ", NameOf(call->d.desc.type));
  }
  if (call->is_low_precision()) JAXMP_RETURN_IF_ERROR(CheckLowPrecisionEpilog(*call, *epilog));
  if (call->epilog != 0 && (call->d.row != 0 || call->d.col != 0)) {
    return Unimplemented("epilog ", epilog->name, " needs D from its first element; id and jd must be 1");
  }
  if (epilog->is_derivative && call->k == 1) {
    return Unimplemented("epilog ", epilog->name, " does not take k = 1");
  }
  if (epilog->has_bias) JAXMP_RETURN_IF_ERROR(CheckBias(desc, executes, call));
  if (epilog->has_aux) JAXMP_RETURN_IF_ERROR(CheckAux(desc, executes, *epilog, call));
  if (epilog->gradient != Gradient::kNone) JAXMP_RETURN_IF_ERROR(CheckGradient(desc, executes, *epilog, call));
  return {};
}

Status CheckUnsupported(const cublasMpMatmulDescriptor& desc, const MatmulCall& call) {
  // Attributes from the aux's scale to D's output scale: ReadScales() reads them for types that take scales.
  for (int number = CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER;
       number <= CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_MODE && !call.takes_scales(); ++number) {
    if (desc.values[static_cast<size_t>(number)] == 0) continue;
    return Unimplemented("attribute ", number, " asks for scaling or an absolute maximum, which ",
                         NameOf(call.d.desc.type), " does not take");
  }
  if (call.communication_sm_count < 0) {
    return InvalidArgument("COMMUNICATION_SM_COUNT must not be negative, got ", call.communication_sm_count);
  }
  if (call.communication_type == -1) return {};
  // Nothing is communicated here, because sums stay in the accumulator; but the real library's rule must hold.
  const auto type = static_cast<cudaDataType_t>(call.communication_type);
  const int64_t bytes = Facts(type).bytes;
  const bool fits = bytes >= Facts(call.d.desc.type).bytes && bytes <= Facts(call.accumulator()).bytes;
  if (fits && call.sums_over_ranks()) return {};
  if (fits) {
    return InvalidArgument("COMMUNICATION_TYPE ", NameOf(type),
                           " is of partial sums, and no rank has any; it goes with A and B distributed along k alone");
  }
  return InvalidArgument("COMMUNICATION_TYPE ", NameOf(type), " must be no smaller than D's ", NameOf(call.d.desc.type),
                         " and no larger than ", NameOf(call.accumulator()));
}

}  // namespace jaxmp::hostmp
