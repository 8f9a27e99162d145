#include "csrc/ffi/host_call.h"

#include <exception>

#include "csrc/ffi/handler.h"

namespace ffi = xla::ffi;

namespace jaxmp {

// The stream's completion. A peer's program resumes in here, so nothing of the call is held any more.
void InFlightCall::OnDone(void* context, const Status& status) {
  InFlightCall* call = static_cast<InFlightCall*>(context);
  call->status_ = status;
  call->Release();
  if (!call->is_second_.exchange(true, std::memory_order_acq_rel)) return;
  ffi::Promise promise = std::move(*call->promise_);
  const ffi::Error error = ToError(status);
  delete call;
  error.success() ? promise.SetAvailable() : promise.SetError(error);
}

// The handler's side: a call that was completed before the handler returns needs no future.
Outcome InFlightCall::Finish() {
  if (!is_second_.load(std::memory_order_acquire)) {
    ffi::Future future(promise_.emplace());
    if (!is_second_.exchange(true, std::memory_order_acq_rel)) return {ffi::Error::Success(), std::move(future)};
  }
  Outcome outcome{ToError(status_)};
  delete this;
  return outcome;
}

Outcome RunRank(std::unique_ptr<InFlightCall> owned, hostmp::Rendezvous& rendezvous, ffi::RunId run, int num_threads,
                const GroupRank& group_rank, int nranks) {
  InFlightCall* call = owned.release();
  call->pool_.emplace(num_threads);
  call->stream_ = {&rendezvous, run.run_id, group_rank.group, &*call->pool_, InFlightCall::OnDone, call};
  Status started;
  try {
    started = call->Start(group_rank.rank, call->stream_);
  } catch (const std::exception& exception) {
    started = ResourceExhausted("jaxmp: ", exception.what());
  }
  // From here on a peer may be waiting: a rank that cannot go on arrives with its error, and all ranks get it.
  if (!started.ok()) hostmp::Fail(call->stream_, group_rank.rank, nranks, started);
  return call->Finish();
}

}  // namespace jaxmp
