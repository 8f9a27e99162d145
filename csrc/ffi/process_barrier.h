// The custom call `jaxmp_process_barrier`: its operands, once every process of the group has come.
#ifndef JAXMP_FFI_PROCESS_BARRIER_H_
#define JAXMP_FFI_PROCESS_BARRIER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "csrc/barrier/call_signature.h"
#include "csrc/base/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct ProcessBarrierSite {
  static xla::ffi::TypeId id;  // XLA writes it when the type is registered
  static const xla::ffi::TypeInfo info;

  explicit ProcessBarrierSite(std::shared_ptr<const CallSignature> signature) : signature(std::move(signature)) {}

  std::shared_ptr<const CallSignature> signature;
};

// The attributes of a process barrier as it sees them; `has_tokens` as in CallSignature.
struct SignatureAttributes {
  std::string_view program;
  int64_t index, repeat;
  std::string_view call, fields;
  xla::ffi::Span<const int64_t> devices, processes, groups;
  int64_t is_sequential;
};
StatusOr<std::shared_ptr<const CallSignature>> SignatureOf(const SignatureAttributes& attributes, bool has_tokens);

// The device's position in the mesh, the argument of this index.
StatusOr<int32_t> PositionOf(const xla::ffi::RemainingArgs& args, size_t index);

// What gives the outcome of a barrier to XLA.
std::function<void(const Status&)> OutcomeSetter(std::shared_ptr<xla::ffi::Promise> promise);

// Once per call site: decodes the attributes program, index, repeat, call, fields, devices, processes, groups and
// is_sequential.
XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Arguments any arrays, then the device's position in the mesh; results the same arrays,
// in the same memory where XLA can arrange it.
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp

#endif  // JAXMP_FFI_PROCESS_BARRIER_H_
