#include "csrc/ffi/host_matmul.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/ffi/call_frame.h"
#include "csrc/ffi/host_call.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan_cache.h"

namespace ffi = xla::ffi;

namespace jaxmp {

namespace {

// ---- instantiate

StatusOr<std::unique_ptr<Site>> MakeMatmulSite(const ffi::Dictionary& dictionary) {
  JAXMP_ASSIGN_OR_RETURN(Attributes attributes, ReadAttributes(dictionary));
  JAXMP_ASSIGN_OR_RETURN(Problem problem, MakeProblem(attributes));
  JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<Plan> plan, plan_cache().Get(host_api(), problem));
  return std::make_unique<Site>(std::move(plan));
}

// ---- execute

class MatmulInFlight final : public InFlightCall {
 public:
  MatmulInFlight(std::shared_ptr<Plan> plan, const Buffers& buffers) : plan_(std::move(plan)), buffers_(buffers) {}

 private:
  Status Start(int rank, hostmp::Stream& stream) override {
    JAXMP_ASSIGN_OR_RETURN(execution_, plan_->Take(rank, buffers_, hostmp::AsStream(&stream)));
    return plan_->Run(rank, *execution_, buffers_, hostmp::AsStream(&stream));
  }
  void Release() override { execution_.reset(); }

  const std::shared_ptr<Plan> plan_;
  const Buffers buffers_;
  Plan::ExecutionHandle execution_;
};

StatusOr<GroupRank> ReadCall(const Plan& plan, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                             Buffers* buffers) {
  const void* position = nullptr;
  JAXMP_RETURN_IF_ERROR(ReadOperands(plan.problem(), plan.distribution(), args, rets, buffers, &position));
  return plan.communicator().Find(position ? *static_cast<const int32_t*>(position) : 0);
}

Outcome RunMatmul(Site* site, ffi::RunId run, ffi::ThreadPool threads, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  Plan& plan = *site->plan;
  Buffers buffers;
  // An error here occurs on every device, because all run one program: each returns the error, and none waits.
  const StatusOr<GroupRank> group_rank = ReadCall(plan, args, rets, &buffers);
  for (void* amax : {buffers.amax_d, buffers.amax_aux}) {
    if (group_rank.ok() && plan.is_empty() && amax) *static_cast<float*>(amax) = 0;
  }
  if (!group_rank.ok() || plan.is_empty()) return {ToError(group_rank.status())};
  return RunProduct(site->plan, buffers, site->rendezvous, run.run_id, static_cast<int>(threads.num_threads()),
                    *group_rank);
}

}  // namespace

Outcome RunProduct(const std::shared_ptr<Plan>& plan, const Buffers& buffers, hostmp::Rendezvous& rendezvous,
                   int64_t run_id, int num_threads, const GroupRank& group_rank) {
  return RunRank(std::make_unique<MatmulInFlight>(plan, buffers), rendezvous, {run_id}, num_threads, group_rank,
                 plan->nranks());
}

XLA_FFI_Error* MatmulInstantiate(XLA_FFI_CallFrame* frame) { return Instantiate<Site, MakeMatmulSite>(frame); }

XLA_FFI_Error* MatmulExecute(XLA_FFI_CallFrame* frame) {
  return Execute<Site, RunMatmul, ffi::RunId, ffi::ThreadPool>(frame);
}

}  // namespace jaxmp
