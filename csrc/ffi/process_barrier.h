// The custom call `jaxmp_process_barrier`: its operands, once every process of the group has come.
#ifndef JAXMP_FFI_PROCESS_BARRIER_H_
#define JAXMP_FFI_PROCESS_BARRIER_H_

#include <memory>
#include <utility>

#include "csrc/barrier/call_signature.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct ProcessBarrierSite {
  static xla::ffi::TypeId id;  // XLA writes it when the type is registered
  static const xla::ffi::TypeInfo info;

  explicit ProcessBarrierSite(std::shared_ptr<const CallSignature> signature) : signature(std::move(signature)) {}

  std::shared_ptr<const CallSignature> signature;
};

// Once per call site: decodes the attributes program, index, call, fields, devices, processes, groups and
// is_sequential.
XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Arguments any arrays, then the device's position in the mesh; results the same arrays,
// in the same memory where XLA can arrange it.
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp

#endif  // JAXMP_FFI_PROCESS_BARRIER_H_
