// One rank's call of hostmp as XLA sees it, from its arrival to its completion.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/bound_threads.h"
#include "csrc/hostmp/handles/runtime.h"
#include "csrc/plan/communicator.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The result of a call that may finish at once: its error or success, or a future if it is still running.
struct Outcome {
  xla::ffi::Error error;
  std::optional<xla::ffi::Future> future = std::nullopt;
};

// The handler and the stream's completion each arrive once, in any order and on any threads; the second one resolves
// the call and deletes it.
class InFlightCall {
 public:
  virtual ~InFlightCall() = default;

 protected:
  // Makes the rank arrive with the stream. After an error the rank has not arrived.
  virtual Status Start(int rank, hostmp::Stream& stream) = 0;
  // Releases what the call holds while it runs.
  virtual void Release() {}

 private:
  friend Outcome RunRank(std::unique_ptr<InFlightCall>, hostmp::Rendezvous&, xla::ffi::RunId, int, const GroupRank&,
                         int);
  static void OnDone(void* context, const Status& status);
  Outcome Finish();

  hostmp::Stream stream_;
  std::optional<hostmp::BoundThreads> pool_;
  Status status_;
  std::optional<xla::ffi::Promise> promise_;
  std::atomic<bool> is_second_{false};
};

// Runs the call of one of `nranks` ranks, on as many threads as XLA uses.
Outcome RunRank(std::unique_ptr<InFlightCall> call, hostmp::Rendezvous& rendezvous, xla::ffi::RunId run,
                int num_threads, const GroupRank& group_rank, int nranks);

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
