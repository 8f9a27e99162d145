// The custom call `jaxmp_roll_call`: its operands, once every process of the group has come.
#ifndef JAXMP_ROLLCALL_HANDLERS_H_
#define JAXMP_ROLLCALL_HANDLERS_H_

#include <memory>
#include <utility>

#include "csrc/rollcall/appointment.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct RollCallSite {
  static xla::ffi::TypeId id;  // XLA writes it when the type is registered
  static const xla::ffi::TypeInfo info;

  explicit RollCallSite(std::shared_ptr<const Appointment> appointment) : appointment(std::move(appointment)) {}

  std::shared_ptr<const Appointment> appointment;
};

// Once per call site: decodes the attributes program, index, call, fields, devices, processes, groups and
// is_sequential.
XLA_FFI_Error* RollCallInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Arguments any arrays, then the device's position in the mesh; results the same arrays,
// in the same memory where XLA can arrange it.
XLA_FFI_Error* RollCallExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp

#endif  // JAXMP_ROLLCALL_HANDLERS_H_
