#include "csrc/ffi/process_collective.h"

#include <complex>
#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/ffi/process_barrier.h"

namespace ffi = xla::ffi;

namespace jaxmp {

namespace {

template <typename T>
void AddAs(void* z, const void* x, const void* y, size_t count) {
  const T *left = static_cast<const T*>(x), *right = static_cast<const T*>(y);
  T* sum = static_cast<T*>(z);
  for (size_t i = 0; i < count; ++i) sum[i] = static_cast<T>(left[i] + right[i]);
}

struct Element {
  size_t bytes;
  Add add;  // none for what is not summed
};

// Accumulators are summed, integers modulo 2^bits.
Element ElementOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return {4, AddAs<float>};
    case ffi::F64:
      return {8, AddAs<double>};
    case ffi::C64:
      return {8, AddAs<std::complex<float>>};
    case ffi::C128:
      return {16, AddAs<std::complex<double>>};
    case ffi::S32:
    case ffi::U32:
      return {4, AddAs<uint32_t>};
    case ffi::S64:
    case ffi::U64:
      return {8, AddAs<uint64_t>};
    default:
      return {1, nullptr};
  }
}

StatusOr<std::unique_ptr<ProcessCollectiveSite>> MakeSite(const ffi::Dictionary& attributes) {
  SharedCollective call;
  int64_t outer = 0, sums = 0;
  JAXMP_ASSIGN_OR_RETURN(call.signature, ReadSignature(attributes, /*has_tokens=*/true));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "ranks", &call.ranks));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "outer", &outer));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "sums", &sums));
  call.outer = outer > 0 ? static_cast<size_t>(outer) : 0;
  call.sums = sums != 0;
  JAXMP_RETURN_IF_ERROR(CheckCollective(call));
  return std::make_unique<ProcessCollectiveSite>(std::make_shared<const SharedCollective>(std::move(call)));
}

Status Decode(const SharedCollective& call, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
              int32_t* position, CollectiveArrays* arrays) {
  if (args.size() != 2 || rets.size() != 1) {
    return InvalidArgument("jaxmp: a collective takes an array and a position and gives an array");
  }
  JAXMP_ASSIGN_OR_RETURN(*position, PositionOf(args, 1));
  const auto operand = args.get<ffi::AnyBuffer>(0);
  auto result = rets.get<ffi::AnyBuffer>(0);
  if (operand.has_error()) return InvalidArgument(operand.error().message());
  if (result.has_error()) return InvalidArgument(result.error().message());
  const Element element = ElementOf(operand->element_type());
  if (operand->element_type() != (*result)->element_type() || (call.sums && !element.add)) {
    return InvalidArgument("jaxmp: a collective does not sum elements of this type");
  }
  *arrays = {static_cast<const char*>(operand->untyped_data()),
             operand->size_bytes(),
             static_cast<char*>((*result)->untyped_data()),
             (*result)->size_bytes(),
             call.sums ? element.bytes : 1,
             element.add};
  return {};
}

ffi::Future Run(ProcessCollectiveSite* site, ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return FutureOf([&](std::function<void(const Status&)> done) -> Status {
    int32_t position = 0;
    CollectiveArrays arrays{};
    JAXMP_RETURN_IF_ERROR(Decode(*site->call, args, rets, &position, &arrays));
    RunCollective(site->call, {site, run.run_id}, position, arrays, std::move(done));
    return {};
  });
}

}  // namespace

XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  return Instantiate<ProcessCollectiveSite, MakeSite>(frame);
}

XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame) {
  return Execute<ProcessCollectiveSite, Run, ffi::RunId>(frame);
}

}  // namespace jaxmp
