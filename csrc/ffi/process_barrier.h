// The custom call `jaxmp_process_barrier`: its operands, once every process of the group has come.
#ifndef JAXMP_FFI_PROCESS_BARRIER_H_
#define JAXMP_FFI_PROCESS_BARRIER_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "csrc/barrier/call_signature.h"
#include "csrc/base/status.h"
#include "csrc/ffi/handler.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct ProcessBarrierSite : SiteType<ProcessBarrierSite> {
  explicit ProcessBarrierSite(std::shared_ptr<const CallSignature> signature) : signature(std::move(signature)) {}

  std::shared_ptr<const CallSignature> signature;
};

// The attributes of a process barrier: program, index, repeat, call, fields, devices, processes, groups and
// is_sequential; `has_tokens` as in CallSignature.
StatusOr<std::shared_ptr<const CallSignature>> ReadSignature(const xla::ffi::Dictionary& attributes, bool has_tokens);

// The device's position in the mesh, the argument of this index.
StatusOr<int32_t> PositionOf(const xla::ffi::RemainingArgs& args, size_t index);

// Once per call site: decodes the attributes.
XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Arguments any arrays, then the device's position in the mesh; results the same arrays,
// in the same memory where XLA can arrange it.
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp

#endif  // JAXMP_FFI_PROCESS_BARRIER_H_
