#include "csrc/ffi/process_barrier.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/barrier/barrier.h"
#include "csrc/base/status.h"

namespace ffi = xla::ffi;

namespace jaxmp {

ffi::TypeId ProcessBarrierSite::id = {};
const ffi::TypeInfo ProcessBarrierSite::info = ffi::MakeTypeInfo<ProcessBarrierSite>();

namespace {

using Indices = ffi::Span<const int64_t>;

// A process barrier counts processes in 32 bits.
Status CheckProcesses(Indices processes) {
  for (int64_t process : processes) {
    if (process >= 0 && process <= INT32_MAX) continue;
    return InvalidArgument("jaxmp: attribute processes of a process barrier must count from 0, got " +
                           std::to_string(process));
  }
  return {};
}

ffi::ErrorOr<std::unique_ptr<ProcessBarrierSite>> Instantiate(std::string_view program, int64_t index, int64_t repeat,
                                                              std::string_view call, std::string_view fields,
                                                              Indices devices, Indices processes, Indices groups,
                                                              int64_t is_sequential) {
  try {
    auto prepared = SignatureOf({program, index, repeat, call, fields, devices, processes, groups, is_sequential},
                                /*has_tokens=*/false);
    if (!prepared.ok()) return ffi::Unexpected(ffi::Error::InvalidArgument(prepared.status().message()));
    return std::make_unique<ProcessBarrierSite>(std::move(*prepared));
  } catch (const std::exception& exception) {  // memory
    return ffi::Unexpected(ffi::Error::Internal(std::string("jaxmp: ") + exception.what()));
  }
}

ffi::Error CopyOperands(const ffi::RemainingArgs& args, ffi::RemainingRets& rets, int32_t* position) {
  if (args.size() != rets.size() + 1) {
    return ffi::Error::InvalidArgument("jaxmp: a process barrier takes its results and a position, got " +
                                       std::to_string(args.size()) + " arguments for " + std::to_string(rets.size()) +
                                       " results");
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto from = args.get<ffi::AnyBuffer>(i);
    auto to = rets.get<ffi::AnyBuffer>(i);
    if (from.has_error()) return from.error();
    if (to.has_error()) return to.error();
    if (from->size_bytes() != (*to)->size_bytes()) {
      return ffi::Error::InvalidArgument("jaxmp: argument " + std::to_string(i) + " of a process barrier has " +
                                         std::to_string(from->size_bytes()) + " bytes, its result " +
                                         std::to_string((*to)->size_bytes()));
    }
    if (from->size_bytes() != 0 && from->untyped_data() != (*to)->untyped_data()) {
      std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    }
  }
  const StatusOr<int32_t> found = PositionOf(args, rets.size());
  if (!found.ok()) return ffi::Error::InvalidArgument(found.status().message());
  *position = *found;
  return ffi::Error::Success();
}

ffi::Future Execute(ProcessBarrierSite* site, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  int32_t position = 0;
  ffi::Error error = CopyOperands(args, rets, &position);
  if (error.failure()) {
    promise->SetError(error);
    return future;
  }
  Arrive(site->signature, position, OutcomeSetter(promise));
  return future;
}

}  // namespace

StatusOr<std::shared_ptr<const CallSignature>> SignatureOf(const SignatureAttributes& attributes, bool has_tokens) {
  JAXMP_RETURN_IF_ERROR(CheckProcesses(attributes.processes));
  CallSignature signature;
  signature.program = attributes.program;
  signature.index = attributes.index;
  signature.repeat = attributes.repeat;
  signature.call = attributes.call;
  signature.fields = attributes.fields;
  signature.devices.assign(attributes.devices.begin(), attributes.devices.end());
  signature.processes.assign(attributes.processes.begin(), attributes.processes.end());
  signature.groups.assign(attributes.groups.begin(), attributes.groups.end());
  signature.is_sequential = attributes.is_sequential != 0;
  signature.has_tokens = has_tokens;
  JAXMP_ASSIGN_OR_RETURN(auto prepared, Prepare(std::move(signature)));
  ExpectCall(*prepared);
  return prepared;
}

StatusOr<int32_t> PositionOf(const ffi::RemainingArgs& args, size_t index) {
  const auto position = args.get<ffi::AnyBuffer>(index);
  if (position.has_error()) return InvalidArgument(position.error().message());
  if (position->element_type() != ffi::S32 || position->element_count() != 1) {
    return InvalidArgument("jaxmp: argument position must be one int32, the device's index in the mesh");
  }
  return *static_cast<const int32_t*>(position->untyped_data());
}

std::function<void(const Status&)> OutcomeSetter(std::shared_ptr<ffi::Promise> promise) {
  return [promise = std::move(promise)](const Status& status) {
    if (status.ok()) {
      promise->SetAvailable();
    } else {
      promise->SetError(ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message()));
    }
  };
}

XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame) {
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
                                   .To(Instantiate)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::Bind().Ctx<ffi::State<ProcessBarrierSite>>().RemainingArgs().RemainingRets().To(Execute).release();
  return handler->Call(frame);
}

}  // namespace jaxmp
