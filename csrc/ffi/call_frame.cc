#include "csrc/ffi/call_frame.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/ffi/handler.h"
#include "csrc/plan/enums.h"

namespace ffi = xla::ffi;

namespace jaxmp {
ffi::Error ToError(const Status& status) {
  constexpr ffi::ErrorCode kCodes[] = {ffi::ErrorCode::kOk,
                                       ffi::ErrorCode::kInvalidArgument,
                                       ffi::ErrorCode::kFailedPrecondition,
                                       ffi::ErrorCode::kUnimplemented,
                                       ffi::ErrorCode::kResourceExhausted,
                                       ffi::ErrorCode::kInternal};  // by Code
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(kCodes[static_cast<size_t>(status.code())], status.message());
}

namespace {

StatusOr<Attribute> AnyAttribute(const ffi::Dictionary& dictionary, std::string_view name) {
  if (auto value = dictionary.get<int64_t>(name)) return Attribute(*value);
  if (auto value = dictionary.get<std::string_view>(name)) return Attribute(std::string(*value));
  if (auto value = dictionary.get<ffi::Span<const int64_t>>(name)) {
    return Attribute(std::vector<int64_t>(value->begin(), value->end()));
  }
  if (auto value = dictionary.get<ffi::Span<const double>>(name)) {
    return Attribute(std::vector<double>(value->begin(), value->end()));
  }
  return InvalidArgument("jaxmp: attribute ", name, " must be an int64, a string, or an array of int64 or float64");
}

}  // namespace

StatusOr<Attributes> ReadAttributes(const ffi::Dictionary& dictionary) {
  Attributes attributes;
  for (std::string_view name : dictionary) {
    JAXMP_ASSIGN_OR_RETURN(Attribute attribute, AnyAttribute(dictionary, name));
    if (attributes.emplace(name, std::move(attribute)).second) continue;
    return InvalidArgument("jaxmp: attribute ", name, " is given twice");
  }
  return attributes;
}

namespace {

// XLA's types, by DType. Not every platform passes f4e2m1: a byte then holds two. On CPUs see CheckBuffer.
constexpr ffi::DataType kFfiTypes[] = {ffi::DataType::INVALID,
                                       ffi::F32,
                                       ffi::F64,
                                       ffi::BF16,
                                       ffi::F16,
                                       ffi::C64,
                                       ffi::C128,
                                       ffi::U8,
                                       ffi::F8E4M3FN,
                                       ffi::F8E5M2,
                                       ffi::U8,
                                       ffi::S8,
                                       ffi::S32,
                                       ffi::S4,
                                       ffi::U4,
                                       ffi::F8E3M4,
                                       ffi::F8E4M3,
                                       ffi::F8E4M3B11FNUZ,
                                       ffi::F8E4M3FNUZ,
                                       ffi::F8E5M2FNUZ,
                                       ffi::F8E8M0FNU};
static_assert(std::size(kFfiTypes) == std::size(kDTypes));

}  // namespace

DType DTypeOf(ffi::DataType type) {
  if (type == ffi::F4E2M1FN) return DType::kE2M1;
  const auto found = std::find(std::begin(kFfiTypes) + 1, std::end(kFfiTypes), type);
  return found == std::end(kFfiTypes) ? DType::kNone : static_cast<DType>(found - std::begin(kFfiTypes));
}

namespace {

// XLA's CPU client stores 4-bit numbers two in a byte, the first in the low half, without padding between rows.
Status CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, DType dtype, int64_t size) {
  const bool is_packed_by_xla = dtype == DType::kE2M1 && buffer.element_type() == ffi::F4E2M1FN;
  if (dtype == DType::kE2M1 && !is_packed_by_xla) size /= 2;
  const bool has_type = is_packed_by_xla || buffer.element_type() == kFfiTypes[static_cast<size_t>(dtype)];
  if (has_type && static_cast<int64_t>(buffer.element_count()) == size) return {};
  std::string shape;
  for (int64_t extent : buffer.dimensions()) shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
  std::string message = std::string("jaxmp: ") + name + " must hold " + std::to_string(size) + " elements of " +
                        NameOf(dtype) + " on each device, got local shape (" + shape + ")";
  if (!has_type) message += " of another dtype (XLA's number " + std::to_string(int(buffer.element_type())) + ")";
  return InvalidArgument(message);
}

// Hands out the buffers of a call frame in the order of the boundary, and checks them.
class Operands {
 public:
  Operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) : args_(args), rets_(rets) {}

  Status Argument(const char* name, DType dtype, int64_t size, const void** to) {
    if (nargs_ >= args_.size()) return InvalidArgument("jaxmp: argument ", name, " is missing");
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = args_.get<ffi::AnyBuffer>(nargs_++);
    if (buffer.has_error()) return Internal(buffer.error().message());
    *to = buffer->untyped_data();
    return CheckBuffer(name, *buffer, dtype, size);
  }

  Status Result(const char* name, DType dtype, int64_t size, void** to) {
    if (nrets_ >= rets_.size()) return InvalidArgument("jaxmp: result ", name, " is missing");
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets_.get<ffi::AnyBuffer>(nrets_++);
    if (buffer.has_error()) return Internal(buffer.error().message());
    *to = (*buffer)->untyped_data();
    return CheckBuffer(name, **buffer, dtype, size);
  }

  // The last argument of a call with more than one rank, unless its attributes name the devices.
  Status Position(const void** to) {
    JAXMP_ASSIGN_OR_RETURN(*to, PositionAt(args_, nargs_++));
    return {};
  }

  Status CheckNoMore() const {
    if (nargs_ == args_.size() && nrets_ == rets_.size()) return {};
    return InvalidArgument("jaxmp: expected ", nargs_, " arguments and ", nrets_, " results, got ", args_.size(),
                           " and ", rets_.size());
  }

 private:
  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  size_t nargs_ = 0, nrets_ = 0;
};

DType ScaleType(ScaleMode mode) {
  const bool is_byte = mode == ScaleMode::kVec16 || mode == ScaleMode::kVec32;
  return is_byte ? DType::kU8 : DType::kF32;
}

Status ReadScales(const Problem& p, const ScaleSizes& sizes, Operands* operands, Buffers* buffers) {
  struct Scale {
    const char* name;
    ScaleMode mode;
    int64_t size;
    const void** to;
  };
  for (const Scale& scale : {Scale{"scale_a", p.scale_mode_a, sizes.a, &buffers->scale_a},
                             Scale{"scale_b", p.scale_mode_b, sizes.b, &buffers->scale_b},
                             Scale{"scale_c", p.scale_mode_c, sizes.c, &buffers->scale_c},
                             Scale{"scale_d", p.scale_mode_d, sizes.d, &buffers->scale_d},
                             Scale{"scale_aux", p.scale_mode_aux, sizes.aux, &buffers->scale_aux}}) {
    if (scale.mode == ScaleMode::kNone) continue;
    JAXMP_RETURN_IF_ERROR(operands->Argument(scale.name, ScaleType(scale.mode), scale.size, scale.to));
  }
  return {};
}

Status Factors(const Problem& p, const Distribution& layout, Operands* operands, Buffers* buffers) {
  JAXMP_RETURN_IF_ERROR(operands->Argument("a", p.dtype_a, layout.a.local_size(), &buffers->a));
  return operands->Argument("b", p.dtype_b, layout.b.local_size(), &buffers->b);
}

}  // namespace

StatusOr<const void*> PositionAt(const ffi::RemainingArgs& args, size_t index) {
  if (index >= args.size()) return InvalidArgument("jaxmp: argument position is missing");
  const ffi::ErrorOr<ffi::AnyBuffer> buffer = args.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) return Internal(buffer.error().message());
  const bool is_index = buffer->element_type() == ffi::U32 || buffer->element_type() == ffi::S32;
  if (is_index && buffer->element_count() > 0) return buffer->untyped_data();
  return InvalidArgument("jaxmp: argument position must be one uint32, the device's index in the mesh");
}

Status ReadFactors(const Problem& p, const Distribution& layout, const ffi::RemainingArgs& args,
                   const ffi::RemainingRets& rets, bool has_d, Buffers* buffers) {
  Operands operands(args, rets);
  JAXMP_RETURN_IF_ERROR(Factors(p, layout, &operands, buffers));
  return has_d ? operands.Result("d", p.dtype_d, layout.d.local_size(), &buffers->d) : Status();
}

Status ReadOperands(const Problem& p, const Distribution& layout, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& rets, Buffers* buffers, const void** position) {
  Operands operands(args, rets);
  JAXMP_RETURN_IF_ERROR(Factors(p, layout, &operands, buffers));
  if (p.has_c()) JAXMP_RETURN_IF_ERROR(operands.Argument("c", p.dtype_c, layout.d.local_size(), &buffers->c));
  if (p.has_bias()) JAXMP_RETURN_IF_ERROR(operands.Argument("bias", p.dtype_bias, layout.bias_size, &buffers->bias));
  const bool writes_aux = p.has_aux() && !p.reads_aux();
  if (p.reads_aux()) {
    JAXMP_RETURN_IF_ERROR(operands.Argument("aux", p.dtype_aux, layout.aux.local_size, &buffers->aux_input));
  }
  JAXMP_RETURN_IF_ERROR(ReadScales(p, layout.scales, &operands, buffers));
  *position = nullptr;
  if (p.nranks() > 1 && p.devices.empty()) JAXMP_RETURN_IF_ERROR(operands.Position(position));
  JAXMP_RETURN_IF_ERROR(operands.Result("d", p.dtype_d, layout.d.local_size(), &buffers->d));
  if (writes_aux) JAXMP_RETURN_IF_ERROR(operands.Result("aux", p.dtype_aux, layout.aux.local_size, &buffers->aux));
  if (p.has_gradient()) {
    JAXMP_RETURN_IF_ERROR(operands.Result("gradient", p.dtype_bias, layout.bias_size, &buffers->gradient));
  }
  if (p.amax_d) JAXMP_RETURN_IF_ERROR(operands.Result("amax_d", DType::kF32, 1, &buffers->amax_d));
  if (p.amax_aux) JAXMP_RETURN_IF_ERROR(operands.Result("amax_aux", DType::kF32, 1, &buffers->amax_aux));
  if (p.d_out_scale_mode != ScaleMode::kNone) {
    JAXMP_RETURN_IF_ERROR(
        operands.Result("d_out_scale", ScaleType(p.d_out_scale_mode), layout.scales.d_out, &buffers->d_out_scale));
  }
  return operands.CheckNoMore();
}

}  // namespace jaxmp
