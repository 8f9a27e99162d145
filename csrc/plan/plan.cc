#include "csrc/plan/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "csrc/cublasmp/status.h"
#include "csrc/plan/enums.h"

namespace jaxmp {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

// Destroyed in reverse order: the descriptor before the handle.
struct Plan::ExecutionContext {
  std::shared_ptr<cublasMpHandle> handle;
  Owned<cublasMpMatmulDescriptor> matmul{nullptr, nullptr};
  std::shared_ptr<void> device_work;
  std::unique_ptr<void, decltype(&std::free)> host_work{nullptr, std::free};
};

namespace {

// Stands for every operand when the library only counts bytes, because it checks pointers for null even then.
Buffers StandIns(const Problem& p, void* some) {
  Buffers buffers;
  buffers.a = buffers.b = buffers.bias = buffers.aux_input = some;
  buffers.scale_a = buffers.scale_b = buffers.scale_c = buffers.scale_d = buffers.scale_aux = some;
  buffers.c = p.has_c() ? some : nullptr;
  buffers.d = buffers.aux = buffers.gradient = buffers.amax_d = buffers.amax_aux = buffers.d_out_scale = some;
  return buffers;
}

}  // namespace

StatusOr<std::shared_ptr<Plan>> Plan::Make(const MpApi& api, const Problem& problem,
                                           std::shared_ptr<const Communicator> communicator) {
  if (problem.fixed_reduction_order() && !api.fix_reduction_order) {
    return Unimplemented("jaxmp: ", api.name, " cannot keep the order of sums, got determinism ", problem.determinism);
  }
  JAXMP_ASSIGN_OR_RETURN(Distribution layout, MakeDistribution(problem));
  std::shared_ptr<Plan> plan(new Plan(api, problem, layout, std::move(communicator)));
  const int num_local_ranks =
      plan->communicator_->is_made_at_once() && !plan->is_empty() ? plan->communicator_->num_local_ranks() : 0;
  for (int local_rank = 0; local_rank < num_local_ranks; ++local_rank) {
    JAXMP_RETURN_IF_ERROR(
        plan->MakeLocalRank(local_rank, StandIns(problem, plan->local_ranks_[0]->beta.bytes), nullptr));
  }
  return plan;
}

Plan::Plan(const MpApi& api, const Problem& problem, const Distribution& layout,
           std::shared_ptr<const Communicator> communicator)
    : api_(api),
      problem_(problem),
      distribution_(layout),
      communicator_(std::move(communicator)),
      alpha_(MakeScalar(problem.alpha)) {
  for (int local_rank = 0; local_rank < communicator_->num_local_ranks(); ++local_rank)
    local_ranks_.push_back(std::make_unique<LocalRank>());
}

Plan::Scalar Plan::MakeScalar(std::complex<double> value) const {
  Scalar scalar = {};
  const auto store = [&scalar](auto typed) { std::memcpy(scalar.bytes, &typed, sizeof(typed)); };
  const bool is_complex = problem_.dtype_a == DType::kC64 || problem_.dtype_a == DType::kC128;
  const bool is_double = IsDouble(problem_.compute);
  if (problem_.compute == Compute::k32I && problem_.dtype_d == DType::kS32) {
    store(static_cast<int32_t>(value.real()));
    return scalar;
  }
  if (is_complex && is_double) store(value);
  if (is_complex && !is_double) store(std::complex<float>(value));
  if (!is_complex && is_double) store(value.real());
  if (!is_complex && !is_double) store(static_cast<float>(value.real()));
  return scalar;
}

Status Plan::MakeLocalRank(int number, const Buffers& buffers, cudaStream_t stream) {
  LocalRank& local_rank = *local_ranks_[static_cast<size_t>(number)];
  const Status made = MakeObjects(number, buffers, stream);
  StatusOr<size_t> bytes = made.ok() ? StatusOr<size_t>(local_rank.device_bytes) : StatusOr<size_t>(made);
  JAXMP_ASSIGN_OR_RETURN(local_rank.device_bytes, objects(number).Agree(problem_, std::move(bytes)));
  local_rank.is_made = true;
  return {};
}

Status Plan::MakeObjects(int number, const Buffers& buffers, cudaStream_t stream) {
  LocalRank& local_rank = *local_ranks_[static_cast<size_t>(number)];
  for (GridKind kind : {GridKind::kColumn, GridKind::kRow, GridKind::kProcess}) {
    if (kind != distribution_.a.grid && kind != distribution_.b.grid && kind != distribution_.d.grid) continue;
    JAXMP_ASSIGN_OR_RETURN(local_rank.grids[static_cast<size_t>(kind)], objects(number).Grid(api_, ShapeOf(kind)));
  }
  JAXMP_RETURN_IF_ERROR(MakeMatrix(local_rank, distribution_.a, problem_.dtype_a, &local_rank.a));
  JAXMP_RETURN_IF_ERROR(MakeMatrix(local_rank, distribution_.b, problem_.dtype_b, &local_rank.b));
  if (problem_.has_c()) JAXMP_RETURN_IF_ERROR(MakeMatrix(local_rank, distribution_.d, problem_.dtype_c, &local_rank.c));
  JAXMP_RETURN_IF_ERROR(MakeMatrix(local_rank, distribution_.d, problem_.dtype_d, &local_rank.d));
  local_rank.beta = MakeScalar(problem_.beta);
  JAXMP_ASSIGN_OR_RETURN(std::unique_ptr<ExecutionContext> execution, MakeExecutionContext(number, stream));
  JAXMP_RETURN_IF_ERROR(SetPointers(api_, execution->matmul.get(), problem_, buffers));
  JAXMP_RETURN_IF_ERROR(Invoke(api_.Matmul_bufferSize, "Matmul_bufferSize", local_rank, *execution, buffers,
                               &local_rank.device_bytes, &local_rank.host_bytes));
  local_rank.free.push_back(std::move(execution));
  return {};
}

// One rank has one grid for all operands, as in cuBLASMp's samples and in nvmath-python, because grids of another order
// are other grids to the library, which may keep it from multiplying locally.
GridShape Plan::ShapeOf(GridKind kind) const {
  if (nranks() == 1) return {1, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR};
  const int64_t nprow = kind == GridKind::kProcess ? communicator_->nprow() : kind == GridKind::kColumn ? nranks() : 1;
  const auto order = kind == GridKind::kRow ? CUBLASMP_GRID_LAYOUT_ROW_MAJOR : CUBLASMP_GRID_LAYOUT_COL_MAJOR;
  return {nprow, nranks() / nprow, order};
}

Status Plan::MakeMatrix(LocalRank& local_rank, const MatrixDistribution& layout, DType dtype,
                        Owned<cublasMpMatrixDescriptor>* matrix) {
  cublasMpMatrixDescriptor_t made = nullptr;
  const int64_t lld = std::max<int64_t>(1, layout.local_rows);
  JAXMP_RETURN_IF_ERROR(
      Check(api_,
            api_.MatrixDescriptorCreate(layout.rows, layout.cols, layout.row_block, layout.col_block, layout.row_source,
                                        layout.col_source, lld, NumberOf(dtype),
                                        local_rank.grids[static_cast<size_t>(layout.grid)].get(), &made),
            "MatrixDescriptorCreate"));
  *matrix = {made, api_.MatrixDescriptorDestroy};
  return {};
}

StatusOr<std::unique_ptr<Plan::ExecutionContext>> Plan::MakeExecutionContext(int local_rank, cudaStream_t stream) {
  auto execution = std::make_unique<ExecutionContext>();
  JAXMP_ASSIGN_OR_RETURN(execution->handle, objects(local_rank).Handle(api_, stream));
  cublasMpMatmulDescriptor_t matmul = nullptr;
  JAXMP_RETURN_IF_ERROR(
      Check(api_, api_.MatmulDescriptorCreate(&matmul, NumberOf(problem_.compute)), "MatmulDescriptorCreate"));
  execution->matmul = {matmul, api_.MatmulDescriptorDestroy};
  JAXMP_RETURN_IF_ERROR(SetAttributes(api_, matmul, problem_, distribution_));
  return execution;
}

Status Plan::TakeWorkspace(int number, ExecutionContext& execution) {
  const LocalRank& local_rank = *local_ranks_[static_cast<size_t>(number)];
  JAXMP_ASSIGN_OR_RETURN(execution.device_work,
                         objects(number).Workspace(api_, ShapeOf(distribution_.d.grid), problem_.pattern,
                                                   local_rank.device_bytes, std::move(execution.device_work)));
  if (local_rank.host_bytes == 0 || execution.host_work) return {};
  execution.host_work.reset(std::malloc(local_rank.host_bytes));
  if (execution.host_work) return {};
  return ResourceExhausted("jaxmp: no memory for a host workspace of ", local_rank.host_bytes, " bytes");
}

template <typename Function, typename... Rest>
Status Plan::Invoke(Function function, const char* name, const LocalRank& local_rank, ExecutionContext& execution,
                    const Buffers& buffers, Rest... rest) {
  const cublasMpMatrixDescriptor_t c = buffers.c ? local_rank.c.get() : nullptr;
  return Check(api_,
               function(execution.handle.get(), execution.matmul.get(), problem_.m, problem_.n, problem_.k,
                        alpha_.bytes, buffers.a, 1, 1, local_rank.a.get(), buffers.b, 1, 1, local_rank.b.get(),
                        local_rank.beta.bytes, buffers.c, 1, 1, c, buffers.d, 1, 1, local_rank.d.get(), rest...),
               name);
}

StatusOr<Plan::ExecutionHandle> Plan::Take(int number, const Buffers& buffers, cudaStream_t stream) {
  LocalRank& local_rank = *local_ranks_[static_cast<size_t>(number)];
  if (!local_rank.is_made) JAXMP_RETURN_IF_ERROR(MakeLocalRank(number, buffers, stream));
  std::unique_ptr<ExecutionContext> execution;
  {
    std::lock_guard<std::mutex> lock(local_rank.mutex);
    if (!local_rank.free.empty()) {
      execution = std::move(local_rank.free.back());
      local_rank.free.pop_back();
    }
  }
  if (!execution) {
    JAXMP_ASSIGN_OR_RETURN(execution, MakeExecutionContext(number, stream));
  }
  // A plan that is only described, never run, takes no workspace.
  JAXMP_RETURN_IF_ERROR(TakeWorkspace(number, *execution));
  return ExecutionHandle(execution.release(), ReturnExecutionContext{this, number});
}

void Plan::TakeBack(int number, ExecutionContext* execution) {
  LocalRank& local_rank = *local_ranks_[static_cast<size_t>(number)];
  std::lock_guard<std::mutex> lock(local_rank.mutex);
  local_rank.free.emplace_back(execution);
}

Status Plan::Run(int number, ExecutionContext& execution, const Buffers& buffers, cudaStream_t stream) {
  const LocalRank& local_rank = *local_ranks_[static_cast<size_t>(number)];
  JAXMP_RETURN_IF_ERROR(objects(number).SetStream(api_, execution.handle.get(), stream));
  JAXMP_RETURN_IF_ERROR(SetPointers(api_, execution.matmul.get(), problem_, buffers));
  return Invoke(api_.Matmul, "Matmul", local_rank, execution, buffers, execution.device_work.get(),
                local_rank.device_bytes, execution.host_work.get(), local_rank.host_bytes);
}

}  // namespace jaxmp
