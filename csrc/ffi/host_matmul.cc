#include "csrc/ffi/host_matmul.h"

#include <atomic>
#include <exception>
#include <optional>
#include <utility>
#include <variant>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/ffi/call_frame.h"
#include "csrc/hostmp/handles/bound_threads.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan_cache.h"

namespace ffi = xla::ffi;

namespace jaxmp {

// What a call that may finish at once returns: its status, or a future where it is still running.
struct Outcome {
  ffi::Error error;
  std::optional<ffi::Future> future = std::nullopt;
};

namespace {

// ---- instantiate

StatusOr<std::unique_ptr<Site>> MakeSite(const ffi::Dictionary& dictionary) {
  JAXMP_ASSIGN_OR_RETURN(Attributes attributes, ReadAttributes(dictionary));
  JAXMP_ASSIGN_OR_RETURN(Problem problem, MakeProblem(attributes));
  JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<Plan> plan, plan_cache().Get(host_api(), problem));
  return std::make_unique<Site>(std::move(plan));
}

// ---- execute

// One rank's call from its arrival to its completion. The handler and the stream's completion both come by once, in
// any order and on any threads; whoever comes second resolves the call and deletes it.
struct InFlightCall {
  explicit InFlightCall(std::shared_ptr<Plan> plan) : plan(std::move(plan)) {}

  std::shared_ptr<Plan> plan;
  Plan::ExecutionHandle execution;
  hostmp::Stream stream;
  Status status;
  std::optional<ffi::Promise> promise;
  std::atomic<bool> is_second{false};
};

// The stream's completion. A peer's program resumes in here, so nothing of the call is held when it does.
void OnDone(void* context, const Status& status) {
  InFlightCall* call = static_cast<InFlightCall*>(context);
  call->status = status;
  call->execution.reset();
  if (!call->is_second.exchange(true, std::memory_order_acq_rel)) return;
  ffi::Promise promise = std::move(*call->promise);
  const ffi::Error error = ToError(status);
  delete call;
  error.success() ? promise.SetAvailable() : promise.SetError(error);
}

// The handler's side: a call that was completed before the handler returns needs no future.
Outcome Finish(InFlightCall* call) {
  if (!call->is_second.load(std::memory_order_acquire)) {
    ffi::Future future(call->promise.emplace());
    if (!call->is_second.exchange(true, std::memory_order_acq_rel)) return {ffi::Error::Success(), std::move(future)};
  }
  Outcome outcome{ToError(call->status)};
  delete call;
  return outcome;
}

Status Start(InFlightCall& call, int rank, const Buffers& buffers) {
  try {
    JAXMP_ASSIGN_OR_RETURN(call.execution, call.plan->Take(rank, buffers, hostmp::AsStream(&call.stream)));
    return call.plan->Run(rank, *call.execution, buffers, hostmp::AsStream(&call.stream));
  } catch (const std::exception& exception) {
    return ResourceExhausted("jaxmp: ", exception.what());
  }
}

StatusOr<GroupRank> ReadCall(const Plan& plan, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                             Buffers* buffers) {
  const void* position = nullptr;
  JAXMP_RETURN_IF_ERROR(ReadOperands(plan.problem(), plan.distribution(), args, rets, buffers, &position));
  return plan.communicator().Find(position ? *static_cast<const int32_t*>(position) : 0);
}

Outcome Run(Site* site, ffi::RunId run, ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Plan& plan = *site->plan;
  Buffers buffers;
  // What is wrong here is wrong on every device, for all run one program: each returns the error, and none waits.
  const StatusOr<GroupRank> group_rank = ReadCall(plan, args, rets, &buffers);
  for (void* amax : {buffers.amax_d, buffers.amax_aux}) {
    if (group_rank.ok() && plan.is_empty() && amax) *static_cast<float*>(amax) = 0;
  }
  if (!group_rank.ok() || plan.is_empty()) return {ToError(group_rank.status())};

  hostmp::BoundThreads pool(static_cast<int>(threads.num_threads()));  // as many as XLA uses
  InFlightCall* call = new InFlightCall(site->plan);
  call->stream = {&site->rendezvous, run.run_id, group_rank->group, &pool, OnDone, call};
  const Status started = Start(*call, group_rank->rank, buffers);
  // From here on a peer may be waiting: a rank that cannot go on arrives with its error, and all of them get it.
  if (!started.ok()) hostmp::Fail(call->stream, group_rank->rank, plan.nranks(), started);
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

XLA_FFI_Error* MatmulInstantiate(XLA_FFI_CallFrame* frame) { return Instantiate<Site, MakeSite>(frame); }

XLA_FFI_Error* MatmulExecute(XLA_FFI_CallFrame* frame) {
  return Execute<Site, Run, ffi::RunId, ffi::ThreadPool>(frame);
}

}  // namespace jaxmp
