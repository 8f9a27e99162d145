#include "csrc/ffi/process_collective.h"

#include <complex>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/ffi/process_barrier.h"

namespace ffi = xla::ffi;

namespace jaxmp {

ffi::TypeId ProcessCollectiveSite::id = {};
const ffi::TypeInfo ProcessCollectiveSite::info = ffi::MakeTypeInfo<ProcessCollectiveSite>();

namespace {

using Indices = ffi::Span<const int64_t>;

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

ffi::ErrorOr<std::unique_ptr<ProcessCollectiveSite>> Instantiate(std::string_view program, int64_t index,
                                                                 int64_t repeat, std::string_view name,
                                                                 std::string_view fields, Indices devices,
                                                                 Indices processes, Indices groups,
                                                                 int64_t is_sequential, Indices ranks, int64_t outer,
                                                                 int64_t sums) {
  try {
    SharedCollective call;
    auto prepared = SignatureOf({program, index, repeat, name, fields, devices, processes, groups, is_sequential},
                                /*has_tokens=*/true);
    if (!prepared.ok()) return ffi::Unexpected(ffi::Error::InvalidArgument(prepared.status().message()));
    call.signature = std::move(*prepared);
    call.ranks.assign(ranks.begin(), ranks.end());
    call.outer = outer > 0 ? static_cast<size_t>(outer) : 0;
    call.sums = sums != 0;
    const Status checked = CheckCollective(call);
    if (!checked.ok()) return ffi::Unexpected(ffi::Error::InvalidArgument(checked.message()));
    return std::make_unique<ProcessCollectiveSite>(std::make_shared<const SharedCollective>(std::move(call)));
  } catch (const std::exception& exception) {  // memory
    return ffi::Unexpected(ffi::Error::Internal(std::string("jaxmp: ") + exception.what()));
  }
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

ffi::Future Execute(ProcessCollectiveSite* site, ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  int32_t position = 0;
  CollectiveArrays arrays{};
  const Status decoded = Decode(*site->call, args, rets, &position, &arrays);
  if (!decoded.ok()) {
    promise->SetError(ffi::Error::InvalidArgument(decoded.message()));
    return future;
  }
  RunCollective(site->call, {site, run.run_id}, position, arrays, OutcomeSetter(promise));
  return future;
}

}  // namespace

XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate()
                                   .Attr<std::string_view>("program")
                                   .Attr<int64_t>("index")
                                   .Attr<int64_t>("repeat")
                                   .Attr<std::string_view>("call")
                                   .Attr<std::string_view>("fields")
                                   .Attr<Indices>("devices")
                                   .Attr<Indices>("processes")
                                   .Attr<Indices>("groups")
                                   .Attr<int64_t>("is_sequential")
                                   .Attr<Indices>("ranks")
                                   .Attr<int64_t>("outer")
                                   .Attr<int64_t>("sums")
                                   .To(Instantiate)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::State<ProcessCollectiveSite>>()
                                   .Ctx<ffi::RunId>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(Execute)
                                   .release();
  return handler->Call(frame);
}

}  // namespace jaxmp
