#include "csrc/ffi/process_barrier.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "csrc/barrier/barrier.h"
#include "csrc/base/status.h"

namespace ffi = xla::ffi;

namespace jaxmp {

namespace {

// A process barrier counts processes in 32 bits.
Status CheckProcesses(const std::vector<int64_t>& processes) {
  for (int64_t process : processes) {
    if (process >= 0 && process <= INT32_MAX) continue;
    return InvalidArgument("jaxmp: attribute processes of a process barrier must count from 0, got " +
                           std::to_string(process));
  }
  return {};
}

StatusOr<std::unique_ptr<ProcessBarrierSite>> MakeSite(const ffi::Dictionary& attributes) {
  JAXMP_ASSIGN_OR_RETURN(auto signature, ReadSignature(attributes, /*has_tokens=*/false));
  return std::make_unique<ProcessBarrierSite>(std::move(signature));
}

Status CopyOperands(const ffi::RemainingArgs& args, ffi::RemainingRets& rets) {
  if (args.size() != rets.size() + 1) {
    return InvalidArgument("jaxmp: a process barrier takes its results and a position, got " +
                           std::to_string(args.size()) + " arguments for " + std::to_string(rets.size()) + " results");
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto from = args.get<ffi::AnyBuffer>(i);
    auto to = rets.get<ffi::AnyBuffer>(i);
    if (from.has_error()) return InvalidArgument(from.error().message());
    if (to.has_error()) return InvalidArgument(to.error().message());
    if (from->size_bytes() != (*to)->size_bytes()) {
      return InvalidArgument("jaxmp: argument " + std::to_string(i) + " of a process barrier has " +
                             std::to_string(from->size_bytes()) + " bytes, its result " +
                             std::to_string((*to)->size_bytes()));
    }
    if (from->size_bytes() != 0 && from->untyped_data() != (*to)->untyped_data()) {
      std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    }
  }
  return {};
}

ffi::Future Run(ProcessBarrierSite* site, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return FutureOf([&](std::function<void(const Status&)> done) -> Status {
    JAXMP_RETURN_IF_ERROR(CopyOperands(args, rets));
    JAXMP_ASSIGN_OR_RETURN(const int32_t position, PositionOf(args, rets.size()));
    Arrive(site->signature, position, std::move(done));
    return {};
  });
}

}  // namespace

StatusOr<std::shared_ptr<const CallSignature>> ReadSignature(const ffi::Dictionary& attributes, bool has_tokens) {
  CallSignature signature;
  int64_t is_sequential = 0;
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "program", &signature.program));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "index", &signature.index));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "repeat", &signature.repeat));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "call", &signature.call));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "fields", &signature.fields));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "devices", &signature.devices));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "processes", &signature.processes));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "groups", &signature.groups));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "is_sequential", &is_sequential));
  JAXMP_RETURN_IF_ERROR(CheckProcesses(signature.processes));
  signature.is_sequential = is_sequential != 0;
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

XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame) {
  return Instantiate<ProcessBarrierSite, MakeSite>(frame);
}

XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame) { return Execute<ProcessBarrierSite, Run>(frame); }

}  // namespace jaxmp
