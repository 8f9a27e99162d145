#include "csrc/handlers.h"

#include <atomic>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/mp_api.h"
#include "csrc/plan_cache.h"
#include "csrc/problem.h"
#include "csrc/status.h"

namespace ffi = xla::ffi;

namespace jaxmp {

ffi::TypeId Site::id = {};
const ffi::TypeInfo Site::info = ffi::MakeTypeInfo<Site>();

// What a call that may finish at once returns: its status, or a future where it is still running.
struct Outcome {
  ffi::Error error;
  std::optional<ffi::Future> future = std::nullopt;
};

namespace {

ffi::ErrorCode ErrorCodeOf(Code code) {
  switch (code) {
    case Code::kOk:
      return ffi::ErrorCode::kOk;
    case Code::kInvalidArgument:
      return ffi::ErrorCode::kInvalidArgument;
    case Code::kFailedPrecondition:
      return ffi::ErrorCode::kFailedPrecondition;
    case Code::kUnimplemented:
      return ffi::ErrorCode::kUnimplemented;
    case Code::kResourceExhausted:
      return ffi::ErrorCode::kResourceExhausted;
    case Code::kInternal:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

ffi::Error ToError(const Status& status) {
  return status.ok() ? ffi::Error::Success() : ffi::Error(ErrorCodeOf(status.code()), status.message());
}

// ---- instantiate

StatusOr<Attribute> ReadAttribute(const ffi::Dictionary& dictionary, std::string_view name) {
  if (auto value = dictionary.get<int64_t>(name)) return Attribute(*value);
  if (auto value = dictionary.get<std::string_view>(name)) return Attribute(std::string(*value));
  if (auto value = dictionary.get<ffi::Span<const int64_t>>(name)) {
    return Attribute(std::vector<int64_t>(value->begin(), value->end()));
  }
  if (auto value = dictionary.get<ffi::Span<const double>>(name)) {
    return Attribute(std::vector<double>(value->begin(), value->end()));
  }
  return InvalidArgument("jaxmp: attribute " + std::string(name) +
                         " must be an int64, a string, or an array of int64 or float64");
}

StatusOr<Attributes> ReadAttributes(const ffi::Dictionary& dictionary) {
  Attributes attributes;
  for (std::string_view name : dictionary) {
    JAXMP_ASSIGN_OR_RETURN(attributes[std::string(name)], ReadAttribute(dictionary, name));
  }
  return attributes;
}

StatusOr<std::unique_ptr<Site>> MakeSite(const ffi::Dictionary& dictionary) {
  JAXMP_ASSIGN_OR_RETURN(Attributes attributes, ReadAttributes(dictionary));
  JAXMP_ASSIGN_OR_RETURN(Problem problem, MakeProblem(attributes));
  JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<Plan> plan, plan_cache().Get(host_api(), problem));
  return std::make_unique<Site>(std::move(plan));
}

ffi::ErrorOr<std::unique_ptr<Site>> Instantiate(ffi::Dictionary dictionary) {
  try {
    StatusOr<std::unique_ptr<Site>> site = MakeSite(dictionary);
    if (!site.ok()) return ffi::Unexpected(ToError(site.status()));
    return std::move(*site);
  } catch (const std::exception& exception) {  // memory
    return ffi::Unexpected(ffi::Error::Internal(std::string("jaxmp: ") + exception.what()));
  }
}

// ---- execute: what the call was given

ffi::DataType FfiType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ffi::F32;
    case DType::kF64:
      return ffi::F64;
    case DType::kBF16:
      return ffi::BF16;
    case DType::kF16:
      return ffi::F16;
    case DType::kC64:
      return ffi::C64;
    case DType::kC128:
      return ffi::C128;
    case DType::kU8:
    case DType::kE2M1:  // two in a byte: XLA has no packed layout that it would hand over on every platform
      return ffi::U8;
    case DType::kE4M3:
      return ffi::F8E4M3FN;
    case DType::kE5M2:
      return ffi::F8E5M2;
    case DType::kS8:
      return ffi::S8;
    case DType::kS32:
      return ffi::S32;
    case DType::kNone:
      break;
  }
  return ffi::DataType::INVALID;
}

Status CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, DType dtype, int64_t size) {
  if (dtype == DType::kE2M1) size /= 2;
  const bool has_type = buffer.element_type() == FfiType(dtype);
  if (has_type && static_cast<int64_t>(buffer.element_count()) == size) return {};
  std::string shape;
  for (int64_t extent : buffer.dimensions()) shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
  std::string message = std::string("jaxmp: ") + name + " must hold " + std::to_string(size) + " elements of " +
                        Name(dtype) + " on each device, got local shape (" + shape + ")";
  if (!has_type) message += " of another dtype (XLA's number " + std::to_string(int(buffer.element_type())) + ")";
  return InvalidArgument(message);
}

// Hands out the buffers of a call frame in the order of the boundary, checking each.
class Operands {
 public:
  Operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) : args_(args), rets_(rets) {}

  Status Argument(const char* name, DType dtype, int64_t size, const void** to) {
    if (nargs_ >= args_.size()) return InvalidArgument(std::string("jaxmp: argument ") + name + " is missing");
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = args_.get<ffi::AnyBuffer>(nargs_++);
    if (buffer.has_error()) return Internal(buffer.error().message());
    *to = buffer->untyped_data();
    return CheckBuffer(name, *buffer, dtype, size);
  }

  Status Result(const char* name, DType dtype, int64_t size, void** to) {
    if (nrets_ >= rets_.size()) return InvalidArgument(std::string("jaxmp: result ") + name + " is missing");
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets_.get<ffi::AnyBuffer>(nrets_++);
    if (buffer.has_error()) return Internal(buffer.error().message());
    *to = (*buffer)->untyped_data();
    return CheckBuffer(name, **buffer, dtype, size);
  }

  // Where this device stands in the mesh: the last argument of a call with more than one rank.
  StatusOr<int64_t> Position() {
    if (nargs_ >= args_.size()) return InvalidArgument("jaxmp: argument position is missing");
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = args_.get<ffi::AnyBuffer>(nargs_++);
    if (buffer.has_error()) return Internal(buffer.error().message());
    if (buffer->element_type() != ffi::S32 || buffer->element_count() != 1) {
      return InvalidArgument("jaxmp: argument position must be one int32, the device's index in the mesh");
    }
    return *static_cast<const int32_t*>(buffer->untyped_data());
  }

  Status CheckNoMore() const {
    if (nargs_ == args_.size() && nrets_ == rets_.size()) return {};
    return InvalidArgument("jaxmp: expected " + std::to_string(nargs_) + " arguments and " + std::to_string(nrets_) +
                           " results, got " + std::to_string(args_.size()) + " and " + std::to_string(rets_.size()));
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

Status ReadOperands(const Plan& plan, Operands operands, Buffers* buffers, Place* place) {
  const Problem& p = plan.problem();
  const Layout& layout = plan.layout();
  JAXMP_RETURN_IF_ERROR(operands.Argument("a", p.dtype_a, layout.a.local_size(), &buffers->a));
  JAXMP_RETURN_IF_ERROR(operands.Argument("b", p.dtype_b, layout.b.local_size(), &buffers->b));
  if (p.has_c()) JAXMP_RETURN_IF_ERROR(operands.Argument("c", p.dtype_c, layout.d.local_size(), &buffers->c));
  if (p.has_bias()) JAXMP_RETURN_IF_ERROR(operands.Argument("bias", p.dtype_bias, layout.bias_size, &buffers->bias));
  const bool writes_aux = p.has_aux() && !p.reads_aux();
  if (p.reads_aux()) {
    JAXMP_RETURN_IF_ERROR(operands.Argument("aux", p.dtype_aux, layout.aux.local_size, &buffers->aux_input));
  }
  JAXMP_RETURN_IF_ERROR(ReadScales(p, layout.scales, &operands, buffers));
  int64_t position = 0;
  if (plan.nranks() > 1) {
    JAXMP_ASSIGN_OR_RETURN(position, operands.Position());
  }
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
  JAXMP_RETURN_IF_ERROR(operands.CheckNoMore());
  const Place* found = plan.communicator().Locate(position);
  if (!found) return InvalidArgument("jaxmp: the mesh has no position " + std::to_string(position));
  *place = *found;
  return {};
}

// ---- execute: the call in flight

// Threads that help the arriving one; XLA's pool may be used until the handler returns, and is.
class XlaPool final : public hostmp::Pool {
 public:
  explicit XlaPool(ffi::ThreadPool pool) : pool_(pool) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  ffi::ThreadPool pool_;
};

// One rank's call from its arrival to its completion. The handler and the stream's completion both come by once, in
// any order and on any threads; whoever comes second resolves the call and deletes it.
struct Call {
  explicit Call(std::shared_ptr<Plan> plan) : plan(std::move(plan)) {}

  std::shared_ptr<Plan> plan;
  Plan::Lease slot;
  hostmp::Stream stream;
  Status status;
  std::optional<ffi::Promise> promise;
  std::atomic<bool> is_second{false};
};

// The stream's completion. A peer's program resumes in here, so nothing of the call is held when it does.
void OnDone(void* context, const Status& status) {
  Call* call = static_cast<Call*>(context);
  call->status = status;
  call->slot.reset();
  if (!call->is_second.exchange(true, std::memory_order_acq_rel)) return;
  ffi::Promise promise = std::move(*call->promise);
  const ffi::Error error = ToError(status);
  delete call;
  error.success() ? promise.SetAvailable() : promise.SetError(error);
}

// The handler's side: a call that was completed before the handler returns needs no future.
Outcome Finish(Call* call) {
  if (!call->is_second.load(std::memory_order_acquire)) {
    ffi::Future future(call->promise.emplace());
    if (!call->is_second.exchange(true, std::memory_order_acq_rel)) return {ffi::Error::Success(), std::move(future)};
  }
  Outcome outcome{ToError(call->status)};
  delete call;
  return outcome;
}

Status Start(Call& call, int rank, const Buffers& buffers) {
  try {
    JAXMP_ASSIGN_OR_RETURN(call.slot, call.plan->Take(rank));
    return call.plan->Run(rank, *call.slot, buffers, hostmp::as_stream(&call.stream));
  } catch (const std::exception& exception) {
    return ResourceExhausted(std::string("jaxmp: ") + exception.what());
  }
}

Outcome Execute(Site* site, ffi::RunId run, ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Plan& plan = *site->plan;
  Buffers buffers;
  Place place = {0, 0};
  // What is wrong here is wrong on every device, for all run one program: each returns the error, and none waits.
  const Status read = ReadOperands(plan, Operands(args, rets), &buffers, &place);
  for (void* amax : {buffers.amax_d, buffers.amax_aux}) {
    if (read.ok() && plan.is_empty() && amax) *static_cast<float*>(amax) = 0;
  }
  if (!read.ok() || plan.is_empty()) return {ToError(read)};

  XlaPool pool(threads);
  Call* call = new Call(site->plan);
  call->stream = {&site->rendezvous, run.run_id, place.group, &pool, OnDone, call};
  const Status started = Start(*call, place.rank, buffers);
  // From here on a peer may be waiting: a rank that cannot go on arrives with its error, and all of them get it.
  if (!started.ok()) hostmp::fail(call->stream, place.rank, plan.nranks(), started);
  return Finish(call);
}

}  // namespace
}  // namespace jaxmp

namespace xla::ffi {

template <>
struct ResultEncoding<ExecutionStage::kExecute, jaxmp::Outcome> {
  static std::variant<XLA_FFI_Error*, XLA_FFI_Future*> Encode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                                              jaxmp::Outcome outcome) {
    if (outcome.future) {
      return ResultEncoding<ExecutionStage::kExecute, Future>::Encode(api, ctx, std::move(*outcome.future));
    }
    return ResultEncoding<ExecutionStage::kExecute, Error>::Encode(api, ctx, std::move(outcome.error));
  }
};

}  // namespace xla::ffi

namespace jaxmp {

XLA_FFI_Error* MatmulInstantiate(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate().Attrs().To(Instantiate).release();
  return handler->Call(frame);
}

// No attribute is bound: they were decoded once, into the plan.
XLA_FFI_Error* MatmulExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::State<Site>>()
                                   .Ctx<ffi::RunId>()
                                   .Ctx<ffi::ThreadPool>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(Execute)
                                   .release();
  return handler->Call(frame);
}

}  // namespace jaxmp
