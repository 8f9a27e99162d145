#include <cstdint>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/hostmp/validate/validate.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

bool IsWide(cudaDataType_t type) { return type == CUDA_R_16F || type == CUDA_R_16BF || type == CUDA_R_32F; }

bool IsPair(cudaDataType_t a, cudaDataType_t b) {
  if (IsFloat8(a) && IsFloat8(b)) return a == CUDA_R_8F_E4M3 || b == CUDA_R_8F_E4M3;
  return a == b && (IsScaled(a) || a == CUDA_R_8I);
}

bool IsResult(cudaDataType_t a, cudaDataType_t b, cudaDataType_t d) {
  if (IsWide(d)) return true;
  if (a == CUDA_R_8I) return d == CUDA_R_32I;
  if (a == CUDA_R_4F_E2M1) return d == CUDA_R_4F_E2M1;
  return d == CUDA_R_8F_E4M3 || (d == CUDA_R_8F_E5M2 && (a == d || b == d));
}

std::string ResultsOf(cudaDataType_t a, cudaDataType_t b) {
  if (a == CUDA_R_8I) return "s32, f16, bf16 or f32";
  if (a == CUDA_R_4F_E2M1) return "f16, bf16, f32 or f4e2m1";
  const bool has_e5m2 = a == CUDA_R_8F_E5M2 || b == CUDA_R_8F_E5M2;
  return std::string("f16, bf16, f32, ") + (has_e5m2 ? "f8e4m3 or f8e5m2" : "or f8e4m3");
}

// The units of the local parts. Rows of 8- and 4-bit numbers must begin at multiples of 16 bytes, and tiles of scales
// must be full (nvmath-python 1.0's rules for its local products).
struct Units {
  int64_t outer, k;
};
Units UnitsOf(const MatmulCall& call) {
  const ScaleMode mode = call.scale_a.mode;
  if (BlockOf(mode) == 16) return {128, 64};
  if (BlockOf(mode) == 32) return {128, 128};
  if (BlockOf(mode) == 128 || BlockOf(call.scale_b.mode) == 128) return {16, 128};
  return {16, 16};
}

Status CheckUnits(const MatmulCall& call) {
  const Units units = UnitsOf(call);
  struct Side {
    const char* name;
    int64_t extent, unit;
  };
  const auto check = [](const Side& side) -> Status {
    if (side.extent % side.unit == 0) return {};
    return InvalidArgument(side.name, " must be a multiple of ", side.unit, " on each rank for these types, got ",
                           side.extent);
  };
  for (const Side& side : {Side{"the rows of A (k)", call.a.local_rows(), units.k},
                           Side{"the columns of A (m)", call.a.local_cols(), units.outer},
                           Side{"the rows of B (k)", call.b.local_rows(), units.k},
                           Side{"the columns of B (n)", call.b.local_cols(), units.outer},
                           Side{"the rows of D (m)", call.d.local_rows(), units.outer}}) {
    JAXMP_RETURN_IF_ERROR(check(side));
  }
  // A rank holds whole blocks only if the distribution does not cut one.
  const std::pair<const char*, const Operand*> sides[] = {{"A", &call.a}, {"B", &call.b}, {"D", &call.d}};
  const auto is_contiguous = [](const Axis& axis) {
    return axis.nprocs == 1 || axis.block * axis.nprocs >= axis.extent;
  };
  for (const auto& [name, x] : sides) {
    const bool is_whole = x->row == 0 && x->col == 0;
    if (is_whole && is_contiguous(x->desc.rows) && is_contiguous(x->desc.cols)) continue;
    return Unimplemented(name, " is block-cyclic or starts within its matrix, which fp8 and fp4 do not take");
  }
  return {};
}

Status CheckModes(const MatmulCall& call) {
  const ScaleMode a = call.scale_a.mode, b = call.scale_b.mode;
  const std::string modes = StrCat("A_SCALE_MODE ", NameOf(a), " and B_SCALE_MODE ", NameOf(b));
  if (call.scales_integers()) {
    if (!BlockOf(a) && !BlockOf(b)) return {};
    return Unimplemented(modes, " have blocks; s8 takes SCALAR_FP32 and OUTER_VEC_FP32");
  }
  const bool both_blk = a == b && a == CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32;
  const bool mixes_128 = BlockOf(a) == 128 && BlockOf(b) == 128;
  if ((a != b && !mixes_128) || both_blk) {
    return Unimplemented(modes, " do not go together; both must be equal, or VEC128 with either of the 128 modes");
  }
  const bool is_float4 = call.a.desc.type == CUDA_R_4F_E2M1;
  if (is_float4 != (BlockOf(a) == 16)) {
    return Unimplemented(modes, " do not fit ", NameOf(call.a.desc.type),
                         is_float4 ? ", which takes VEC16_UE4M3" : ", which takes every other mode");
  }
  if (ScalesSums(a) && call.stores_low_precision()) {
    return Unimplemented(modes, " give f16, bf16 or f32, not ", NameOf(call.d.desc.type));
  }
  return {};
}

Status CheckOutput(const MatmulCall& call) {
  const bool is_blocked = IsTiled(call.scale_a.mode);
  const cudaDataType_t d = call.d.desc.type;
  if (call.scale_d.data && !call.stores_low_precision()) {
    return Unimplemented("D_SCALE_POINTER is set, but D is ", NameOf(d), "; only fp8 and fp4 are scaled");
  }
  if (call.scale_d.data && is_blocked && d != CUDA_R_4F_E2M1) {
    return Unimplemented("D_SCALE_POINTER is set, but blocks of 32 get their scales in D_OUT_SCALE_POINTER");
  }
  if (call.scale_c.data && (is_blocked || ScalesSums(call.scale_a.mode))) {
    return Unimplemented("C_SCALE_POINTER is set; C takes a scale with tensor-wide scaling only");
  }
  if (call.amax_d && (!IsFloat8(d) || is_blocked)) {
    return Unimplemented("AMAX_D_POINTER is set; the largest value is taken of an fp8 D with tensor-wide scales");
  }
  const bool has_fp8_aux = IsFloat8(call.aux_type);
  if ((call.scale_aux.data || call.amax_aux) && !has_fp8_aux) {
    return Unimplemented("EPILOGUE_AUX_SCALE_POINTER or EPILOGUE_AUX_AMAX_POINTER is set, but the aux is not fp8");
  }
  if (has_fp8_aux && is_blocked) {
    return Unimplemented("the aux is fp8, which goes with tensor-wide scales only");
  }
  const bool needs_out_scale = is_blocked && call.stores_low_precision();
  if (call.has_d_out_scale == needs_out_scale) return {};
  return InvalidArgument("D_OUT_SCALE_MODE is ", call.has_d_out_scale ? "set" : "not set", ", but D is ", NameOf(d),
                         needs_out_scale ? ", whose blocks get scales" : ", which has no scales");
}

}  // namespace

Status CheckLowPrecisionTypes(const MatmulCall& call) {
  const cudaDataType_t a = call.a.desc.type, b = call.b.desc.type, d = call.d.desc.type;
  if (!IsPair(a, b)) {
    return Unimplemented("A is ", NameOf(a), " and B is ", NameOf(b), "; fp8 takes fp8 (not f8e5m2 twice), ",
                         "f4e2m1 and s8 their own type");
  }
  if (!IsResult(a, b, d)) {
    return Unimplemented("A is ", NameOf(a), ", B is ", NameOf(b), " and D is ", NameOf(d), "; D must be ",
                         ResultsOf(a, b));
  }
  const cublasComputeType_t compute = a == CUDA_R_8I ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F;
  if (call.compute != compute) {
    return Unimplemented("the compute type is ", static_cast<int>(call.compute), " but A is ", NameOf(a),
                         ", which takes CUBLAS_COMPUTE_", a == CUDA_R_8I ? "32I" : "32F");
  }
  if (IsScaled(a) && (call.trans_a != CUBLAS_OP_T || call.trans_b != CUBLAS_OP_N)) {
    return Unimplemented(NameOf(a), " is multiplied with TRANSA=T and TRANSB=N only; store both along k");
  }
  return {};
}

Status CheckMixedTypes(const MatmulCall& call) {
  const cudaDataType_t a = call.a.desc.type, b = call.b.desc.type, d = call.d.desc.type;
  if (!IsWide(Facts(a).is_low_precision ? b : a) || !IsWide(d)) {
    return Unimplemented("A is ", NameOf(a), ", B is ", NameOf(b), " and D is ", NameOf(d),
                         "; beside 8 bits and fewer the other operand and D must be f16, bf16 or f32");
  }
  if (call.compute == CUBLAS_COMPUTE_32F || call.compute == CUBLAS_COMPUTE_32F_PEDANTIC) return {};
  return Unimplemented("the compute type is ", static_cast<int>(call.compute), " but A is ", NameOf(a), " and B is ",
                       NameOf(b), ", which take CUBLAS_COMPUTE_32F");
}

Status CheckLowPrecisionC(cudaDataType_t c) {
  if (c == CUDA_R_16F || c == CUDA_R_16BF) return {};
  return Unimplemented("C is ", NameOf(c), " and D is fp8 or fp4; C must be f16 or bf16");
}

Status CheckLowPrecisionBias(const MatmulCall& call) {
  const cudaDataType_t d = call.d.desc.type, bias = call.bias_type;
  const bool is_right = call.stores_low_precision() ? bias == (call.c.data ? call.c.desc.type : CUDA_R_16F) ||
                                                          (!call.c.data && bias == CUDA_R_16BF)
                                                    : bias == (d == CUDA_R_32F ? CUDA_R_16BF : d);
  if (is_right) return {};
  return Unimplemented("the bias is ", NameOf(bias), " and D is ", NameOf(d),
                       "; D of f16 takes f16, of bf16 and f32 bf16, of fp8 and fp4 the type of C");
}

Status CheckLowPrecisionEpilog(const MatmulCall& call, const Epilog& epilog) {
  if (call.epilog == 0 || (call.scales_integers() && epilog.gradient == Gradient::kNone)) return {};
  if (call.a.desc.type == CUDA_R_8I) {
    return Unimplemented("epilog ", epilog.name, " has no form for s8 and D of ", NameOf(call.d.desc.type),
                         "; use DEFAULT");
  }
  const bool is_gelu = epilog.activation == Activation::kGelu;
  if ((is_gelu && (!epilog.has_aux || epilog.is_derivative)) || epilog.gradient != Gradient::kNone) {
    return Unimplemented("cuBLAS has no epilog ", epilog.name, " for ", NameOf(call.a.desc.type),
                         "; use BIAS, an epilog of RELU or DRELU, or GELU_AUX");
  }
  if (is_gelu && call.d.desc.type == CUDA_R_4F_E2M1) {
    return Unimplemented("epilog ", epilog.name, " is not computed for D of ", NameOf(call.d.desc.type),
                         "; use a D of 8 bits or more");
  }
  return {};
}

Status CheckLowPrecisionAux(const MatmulCall& call, const Epilog& epilog) {
  const cudaDataType_t aux = call.aux_type, c = call.has_c ? call.c.desc.type : CUDA_R_16F;
  if (aux == c || (!call.has_c && aux == CUDA_R_16BF)) return {};
  const bool is_e4m3 = aux == CUDA_R_8F_E4M3 && call.a.desc.type == aux && call.b.desc.type == aux &&
                       call.d.desc.type == aux && c == CUDA_R_16F;
  if (is_e4m3 && call.epilog == CUBLASMP_MATMUL_EPILOGUE_GELU_AUX) return {};
  return Unimplemented("the aux is ", NameOf(aux), " beside D of ", NameOf(call.d.desc.type), " and epilog ",
                       epilog.name,
                       "; EPILOGUE_AUX_DATA_TYPE must be the type of C, or f8e4m3 where A, B and D "
                       "are f8e4m3, C is f16 and the epilog is GELU_AUX");
}

Status ReadScales(const cublasMpMatmulDescriptor& desc, bool executes, MatmulCall* call) {
  if (!call->takes_scales()) return {};
  const auto read_with = [&desc](int pointer, int number, Scales* scales) -> Status {
    scales->data = AttributeOf<const void*>(desc, pointer);
    const int mode = AttributeOf<int>(desc, number);
    if (mode < 0 || mode > CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32) {
      return InvalidArgument("attribute ", number, " is ", mode, ", which is no scale mode");
    }
    scales->mode = static_cast<ScaleMode>(mode);
    return {};
  };
  const auto read = [&](int pointer, Scales* scales) { return read_with(pointer, pointer + 1, scales); };
  JAXMP_RETURN_IF_ERROR(read(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER, &call->scale_a));
  JAXMP_RETURN_IF_ERROR(read(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER, &call->scale_b));
  JAXMP_RETURN_IF_ERROR(read(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_POINTER, &call->scale_c));
  JAXMP_RETURN_IF_ERROR(read(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER, &call->scale_d));
  JAXMP_RETURN_IF_ERROR(read(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_POINTER, &call->d_out_scale));
  JAXMP_RETURN_IF_ERROR(read_with(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER,
                                  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE, &call->scale_aux));
  call->amax_aux = AttributeOf<uint32_t*>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER);
  call->has_d_out_scale = desc.is_set[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_MODE];
  call->amax_d = AttributeOf<uint32_t*>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER);
  JAXMP_RETURN_IF_ERROR(CheckModes(*call));
  JAXMP_RETURN_IF_ERROR(CheckOutput(*call));
  for (const Scales* scalar : {&call->scale_c, &call->scale_d, &call->scale_aux}) {
    if (scalar->mode == CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32) continue;
    return Unimplemented("C_SCALE_MODE, D_SCALE_MODE and EPILOGUE_AUX_SCALE_MODE must be SCALAR_FP32, got ",
                         NameOf(scalar->mode));
  }
  if (call->has_d_out_scale && call->d_out_scale.mode != call->scale_a.mode) {
    return Unimplemented("D_OUT_SCALE_MODE is ", NameOf(call->d_out_scale.mode), ", but the operands have ",
                         NameOf(call->scale_a.mode));
  }
  const std::pair<const char*, const Scales*> needed[] = {{"A_SCALE_POINTER", &call->scale_a},
                                                          {"B_SCALE_POINTER", &call->scale_b},
                                                          {"D_OUT_SCALE_POINTER", &call->d_out_scale}};
  for (const auto& [name, scales] : needed) {
    const bool is_scalar = scales->mode == CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
    if (executes && !is_scalar && !scales->data) {
      return InvalidArgument(name, " is not set, but its mode is ", NameOf(scales->mode));
    }
  }
  return call->scales_integers() ? Status() : CheckUnits(*call);
}

}  // namespace jaxmp::hostmp
