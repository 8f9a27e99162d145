#include "csrc/plan/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "csrc/cublasmp/status.h"
#include "csrc/plan/enums.h"

namespace jaxmp {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

// The destruction order is the reverse of this one: a descriptor goes before the handle.
struct Plan::Slot {
  std::shared_ptr<cublasMpHandle> handle;
  Owned<cublasMpMatmulDescriptor> matmul{nullptr, nullptr};
  std::shared_ptr<void> device_work;
  std::unique_ptr<void, decltype(&std::free)> host_work{nullptr, std::free};
};

namespace {

// An algorithm that overlaps, asked for by name, wants a workspace that the library knows.
bool NeedsRegisteredWorkspace(const Problem& p) {
  return p.algorithm != Algorithm::kDefault && p.algorithm != Algorithm::kNoOverlap;
}

Status CheckCapabilities(const Library& library, const Problem& p) {
  const std::string who = std::string("jaxmp: ") + library.name + " ";
  const bool is_tn = p.trans_a != Op::kN && p.trans_b == Op::kN;
  if (p.pattern == Pattern::kAllReduce && !is_tn && !library.capabilities.all_reduce_any_transposition) {
    return Unimplemented(who + "takes all_reduce with trans_a=T and trans_b=N only; store A as (k, m)");
  }
  if (p.pattern == Pattern::kGrid && !p.is_cyclic() && p.nprow() != p.npcol() && !library.capabilities.grid_any_shape) {
    return Unimplemented(who + "takes square grids only, got " + std::to_string(p.nprow()) + "x" +
                         std::to_string(p.npcol()));
  }
  if (p.pattern == Pattern::kGrid && p.epilog != 0 && !library.capabilities.grid_epilogs) {
    return Unimplemented(who + "takes no epilog on a grid, got epilog " + std::to_string(p.epilog));
  }
  const bool is_complex = p.dtype_a == DType::kC64 || p.dtype_a == DType::kC128;
  if (is_complex && p.epilog != 0 && !library.capabilities.complex_epilogs) {
    return Unimplemented(who + "takes no epilog with complex numbers, got epilog " + std::to_string(p.epilog));
  }
  if (p.is_ordered() && !library.can_order_sums) {
    return Unimplemented(who + "cannot keep the order of sums, got determinism " + p.determinism);
  }
  return {};
}

// Stands for every operand where the library only counts bytes: it checks pointers for null even there.
Buffers StandIns(const Problem& p, void* some) {
  Buffers buffers;
  buffers.a = buffers.b = buffers.bias = buffers.aux_input = some;
  buffers.scale_a = buffers.scale_b = buffers.scale_c = buffers.scale_d = buffers.scale_aux = some;
  buffers.c = p.has_c() ? some : nullptr;
  buffers.d = buffers.aux = buffers.gradient = buffers.amax_d = buffers.amax_aux = buffers.d_out_scale = some;
  return buffers;
}

}  // namespace

StatusOr<Layout> LayoutOn(const Library& library, const Problem& problem) {
  JAXMP_RETURN_IF_ERROR(CheckCapabilities(library, problem));
  return MakeLayout(problem);
}

const char* AlgorithmOf(const Problem& problem) {
  switch (problem.pattern) {
    case Pattern::kLocal:
      return "local Matmul";
    case Pattern::kAllGather:
      return "AllGather + Matmul";
    case Pattern::kReduceScatter:
      return "Matmul + ReduceScatter";
    case Pattern::kAllReduce:
      return "Matmul + AllReduce";
    case Pattern::kGrid:
      return "generic Matmul";
  }
  return "?";
}

StatusOr<std::shared_ptr<Plan>> Plan::Make(const MpApi& api, const Problem& problem,
                                           std::shared_ptr<const Communicator> communicator) {
  JAXMP_ASSIGN_OR_RETURN(Layout layout, LayoutOn({api.name, api.capabilities, api.order_sums != nullptr}, problem));
  std::shared_ptr<Plan> plan(new Plan(api, problem, layout, std::move(communicator)));
  const int nseats = plan->communicator_->is_made_at_once() && !plan->is_empty() ? plan->communicator_->nseats() : 0;
  for (int seat = 0; seat < nseats; ++seat) {
    JAXMP_RETURN_IF_ERROR(plan->MakeSeat(seat, StandIns(problem, plan->seats_[0]->beta.bytes), nullptr));
  }
  return plan;
}

Plan::Plan(const MpApi& api, const Problem& problem, const Layout& layout,
           std::shared_ptr<const Communicator> communicator)
    : api_(api),
      problem_(problem),
      layout_(layout),
      communicator_(std::move(communicator)),
      alpha_(MakeScalar(problem.alpha)) {
  for (int seat = 0; seat < communicator_->nseats(); ++seat) seats_.push_back(std::make_unique<Seat>());
}

Plan::Scalar Plan::MakeScalar(std::complex<double> value) const {
  Scalar scalar = {};
  const auto store = [&scalar](auto typed) { std::memcpy(scalar.bytes, &typed, sizeof(typed)); };
  const bool is_complex = problem_.dtype_a == DType::kC64 || problem_.dtype_a == DType::kC128;
  const bool is_double = IsDouble(problem_.compute);
  if (problem_.compute == Compute::k32I) {
    store(static_cast<int32_t>(value.real()));
    return scalar;
  }
  if (is_complex && is_double) store(value);
  if (is_complex && !is_double) store(std::complex<float>(value));
  if (!is_complex && is_double) store(value.real());
  if (!is_complex && !is_double) store(static_cast<float>(value.real()));
  return scalar;
}

Status Plan::MakeSeat(int number, const Buffers& buffers, cudaStream_t stream) {
  Seat& seat = *seats_[static_cast<size_t>(number)];
  const Status made = MakeObjects(number, buffers, stream);
  StatusOr<size_t> bytes = made.ok() ? StatusOr<size_t>(seat.device_bytes) : StatusOr<size_t>(made);
  JAXMP_ASSIGN_OR_RETURN(seat.device_bytes, communicator_->Agree(number, std::move(bytes), stream));
  seat.is_made = true;
  return {};
}

Status Plan::MakeObjects(int number, const Buffers& buffers, cudaStream_t stream) {
  Seat& seat = *seats_[static_cast<size_t>(number)];
  for (GridKind kind : {GridKind::kColumn, GridKind::kRow, GridKind::kProcess}) {
    if (kind != layout_.a.grid && kind != layout_.b.grid && kind != layout_.d.grid) continue;
    JAXMP_ASSIGN_OR_RETURN(seat.grids[static_cast<size_t>(kind)], communicator_->Grid(api_, number, ShapeOf(kind)));
  }
  JAXMP_RETURN_IF_ERROR(MakeMatrix(seat, layout_.a, problem_.dtype_a, &seat.a));
  JAXMP_RETURN_IF_ERROR(MakeMatrix(seat, layout_.b, problem_.dtype_b, &seat.b));
  if (problem_.has_c()) JAXMP_RETURN_IF_ERROR(MakeMatrix(seat, layout_.d, problem_.dtype_c, &seat.c));
  JAXMP_RETURN_IF_ERROR(MakeMatrix(seat, layout_.d, problem_.dtype_d, &seat.d));
  // The all-reduce sums what every rank adds of its C, which is the same C everywhere: one rank adds it.
  const bool adds_c = problem_.pattern != Pattern::kAllReduce || communicator_->rank_of(number) == 0;
  seat.beta = MakeScalar(adds_c ? problem_.beta : 0.0);
  JAXMP_ASSIGN_OR_RETURN(std::unique_ptr<Slot> slot, MakeSlot(number, stream));
  JAXMP_RETURN_IF_ERROR(SetPointers(api_, slot->matmul.get(), problem_, buffers));
  JAXMP_RETURN_IF_ERROR(
      Call(api_.Matmul_bufferSize, "Matmul_bufferSize", seat, *slot, buffers, &seat.device_bytes, &seat.host_bytes));
  seat.free.push_back(std::move(slot));
  return {};
}

// The two one-dimensional grids differ in their order only where there is one rank; cuBLASMp's samples name them so.
GridShape Plan::ShapeOf(GridKind kind) const {
  const int64_t nprow = kind == GridKind::kProcess ? communicator_->nprow() : kind == GridKind::kColumn ? nranks() : 1;
  const auto order = kind == GridKind::kRow ? CUBLASMP_GRID_LAYOUT_ROW_MAJOR : CUBLASMP_GRID_LAYOUT_COL_MAJOR;
  return {nprow, nranks() / nprow, order};
}

Status Plan::MakeMatrix(Seat& seat, const MatrixLayout& layout, DType dtype, Owned<cublasMpMatrixDescriptor>* matrix) {
  cublasMpMatrixDescriptor_t made = nullptr;
  const int64_t lld = std::max<int64_t>(1, layout.local_rows);
  JAXMP_RETURN_IF_ERROR(Check(api_,
                              api_.MatrixDescriptorCreate(layout.rows, layout.cols, layout.row_block, layout.col_block,
                                                          layout.row_source, layout.col_source, lld, CudaType(dtype),
                                                          seat.grids[static_cast<size_t>(layout.grid)].get(), &made),
                              "MatrixDescriptorCreate"));
  *matrix = {made, api_.MatrixDescriptorDestroy};
  return {};
}

StatusOr<std::unique_ptr<Plan::Slot>> Plan::MakeSlot(int seat, cudaStream_t stream) {
  auto slot = std::make_unique<Slot>();
  JAXMP_ASSIGN_OR_RETURN(slot->handle, communicator_->Handle(api_, seat, stream));
  cublasMpMatmulDescriptor_t matmul = nullptr;
  JAXMP_RETURN_IF_ERROR(
      Check(api_, api_.MatmulDescriptorCreate(&matmul, CublasCompute(problem_.compute)), "MatmulDescriptorCreate"));
  slot->matmul = {matmul, api_.MatmulDescriptorDestroy};
  JAXMP_RETURN_IF_ERROR(SetAttributes(api_, matmul, problem_, layout_));
  return slot;
}

Status Plan::TakeWorkspace(int number, Slot& slot) {
  const Seat& seat = *seats_[static_cast<size_t>(number)];
  JAXMP_ASSIGN_OR_RETURN(slot.device_work,
                         communicator_->Workspace(api_, number, ShapeOf(layout_.d.grid), seat.device_bytes,
                                                  NeedsRegisteredWorkspace(problem_), std::move(slot.device_work)));
  if (seat.host_bytes == 0 || slot.host_work) return {};
  slot.host_work.reset(std::malloc(seat.host_bytes));
  if (slot.host_work) return {};
  return ResourceExhausted("jaxmp: no memory for a host workspace of " + std::to_string(seat.host_bytes) + " bytes");
}

template <typename Function, typename... Rest>
Status Plan::Call(Function function, const char* name, const Seat& seat, Slot& slot, const Buffers& buffers,
                  Rest... rest) {
  const cublasMpMatrixDescriptor_t c = buffers.c ? seat.c.get() : nullptr;
  return Check(api_,
               function(slot.handle.get(), slot.matmul.get(), problem_.m, problem_.n, problem_.k, alpha_.bytes,
                        buffers.a, 1, 1, seat.a.get(), buffers.b, 1, 1, seat.b.get(), seat.beta.bytes, buffers.c, 1, 1,
                        c, buffers.d, 1, 1, seat.d.get(), rest...),
               name);
}

StatusOr<Plan::Lease> Plan::Take(int number, const Buffers& buffers, cudaStream_t stream) {
  Seat& seat = *seats_[static_cast<size_t>(number)];
  if (!seat.is_made) JAXMP_RETURN_IF_ERROR(MakeSeat(number, buffers, stream));
  std::unique_ptr<Slot> slot;
  {
    std::lock_guard<std::mutex> lock(seat.mutex);
    if (!seat.free.empty()) {
      slot = std::move(seat.free.back());
      seat.free.pop_back();
    }
  }
  if (!slot) {
    JAXMP_ASSIGN_OR_RETURN(slot, MakeSlot(number, stream));
  }
  // A plan that is only described, never run, costs no workspace.
  JAXMP_RETURN_IF_ERROR(TakeWorkspace(number, *slot));
  return Lease(slot.release(), ReturnSlot{this, number});
}

void Plan::TakeBack(int number, Slot* slot) {
  Seat& seat = *seats_[static_cast<size_t>(number)];
  std::lock_guard<std::mutex> lock(seat.mutex);
  seat.free.emplace_back(slot);
}

Status Plan::Run(int number, Slot& slot, const Buffers& buffers, cudaStream_t stream) {
  const Seat& seat = *seats_[static_cast<size_t>(number)];
  JAXMP_RETURN_IF_ERROR(Check(api_, api_.SetStream(slot.handle.get(), stream), "SetStream"));
  JAXMP_RETURN_IF_ERROR(SetPointers(api_, slot.matmul.get(), problem_, buffers));
  return Call(api_.Matmul, "Matmul", seat, slot, buffers, slot.device_work.get(), seat.device_bytes,
              slot.host_work.get(), seat.host_bytes);
}

}  // namespace jaxmp
