#include "csrc/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

namespace jaxmp {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

// The destruction order is the reverse of this one: a descriptor goes before the handle.
struct Plan::Slot {
  Owned<cublasMpHandle> handle{nullptr, nullptr};
  Owned<cublasMpMatmulDescriptor> matmul{nullptr, nullptr};
  std::unique_ptr<void, std::function<void(void*)>> device_work{nullptr, std::free}, host_work{nullptr, std::free};
  bool has_workspace = false;
};

namespace {

constexpr size_t kWorkspaceAlignment = 64;  // a cache line, and an AVX-512 register

cudaDataType_t CudaType(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return CUDA_R_64F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kC64:
      return CUDA_C_32F;
    case DType::kC128:
      return CUDA_C_64F;
    case DType::kU8:
      return CUDA_R_8U;
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    case DType::kE2M1:
      return CUDA_R_4F_E2M1;
    case DType::kS8:
      return CUDA_R_8I;
    case DType::kS32:
      return CUDA_R_32I;
    case DType::kF32:
    case DType::kNone:
      break;
  }
  return CUDA_R_32F;
}

cublasOperation_t CublasOp(Op op) { return op == Op::kN ? CUBLAS_OP_N : op == Op::kT ? CUBLAS_OP_T : CUBLAS_OP_C; }

cublasComputeType_t CublasCompute(Compute compute) {
  switch (compute) {
    case Compute::k32F:
      return CUBLAS_COMPUTE_32F;
    case Compute::k32FPedantic:
      return CUBLAS_COMPUTE_32F_PEDANTIC;
    case Compute::k32FFastTF32:
      return CUBLAS_COMPUTE_32F_FAST_TF32;
    case Compute::k32FFast16BF:
      return CUBLAS_COMPUTE_32F_FAST_16BF;
    case Compute::k32FFast16F:
      return CUBLAS_COMPUTE_32F_FAST_16F;
    case Compute::k32FEmulated16BFX9:
      return CUBLAS_COMPUTE_32F_EMULATED_16BFX9;
    case Compute::k64F:
      return CUBLAS_COMPUTE_64F;
    case Compute::k64FPedantic:
      return CUBLAS_COMPUTE_64F_PEDANTIC;
    case Compute::k32I:
      return CUBLAS_COMPUTE_32I;
    case Compute::k64FEmulatedFixedPoint:
      break;
  }
  return CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT;
}

cublasMpMatmulMatrixScale_t CublasScale(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kVec16:
      return CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    case ScaleMode::kVec32:
      return CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::kOuterVec:
      return CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32;
    case ScaleMode::kVec128:
      return CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32;
    case ScaleMode::kBlk128:
      return CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32;
    case ScaleMode::kNone:
    case ScaleMode::kScalar:
      break;
  }
  return CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
}

bool IsDouble(Compute compute) {
  return compute == Compute::k64F || compute == Compute::k64FPedantic || compute == Compute::k64FEmulatedFixedPoint;
}

cublasMpMatmulAlgoType_t AlgoType(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kDefault:
      break;
    case Algorithm::kSplitP2P:
      return CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P;
    case Algorithm::kSplitMulticast:
      return CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST;
    case Algorithm::kAtomicP2P:
      return CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P;
    case Algorithm::kAtomicMulticast:
      return CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST;
    case Algorithm::kNoOverlap:
      return CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP;
    case Algorithm::kFused:
      return CUBLASMP_MATMUL_ALGO_TYPE_FUSED;
  }
  return CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT;
}

// An algorithm that overlaps, asked for by name, wants a workspace that the library knows.
bool NeedsRegisteredWorkspace(const Problem& p) {
  return p.algorithm != Algorithm::kDefault && p.algorithm != Algorithm::kNoOverlap;
}

Status CheckCapabilities(const MpApi& api, const Problem& p) {
  const std::string library = std::string("jaxmp: ") + api.name + " ";
  const bool is_tn = p.trans_a != Op::kN && p.trans_b == Op::kN;
  if (p.pattern == Pattern::kAllReduce && !is_tn && !api.capabilities.all_reduce_any_transposition) {
    return Unimplemented(library + "takes all_reduce with trans_a=T and trans_b=N only; store A as (k, m)");
  }
  if (p.pattern == Pattern::kGrid && !p.is_cyclic() && p.nprow() != p.npcol() && !api.capabilities.grid_any_shape) {
    return Unimplemented(library + "takes square grids only, got " + std::to_string(p.nprow()) + "x" +
                         std::to_string(p.npcol()));
  }
  if (p.pattern == Pattern::kGrid && p.epilog != 0 && !api.capabilities.grid_epilogs) {
    return Unimplemented(library + "takes no epilog on a grid, got epilog " + std::to_string(p.epilog));
  }
  if (p.is_ordered() && !api.order_sums) {
    return Unimplemented(library + "cannot keep the order of sums, got determinism " + p.determinism);
  }
  return {};
}

Code CodeOf(cublasMpStatus_t status) {
  switch (status) {
    case CUBLASMP_STATUS_INVALID_VALUE:
      return Code::kInvalidArgument;
    case CUBLASMP_STATUS_NOT_SUPPORTED:
    case CUBLASMP_STATUS_ARCHITECTURE_MISMATCH:
      return Code::kUnimplemented;
    case CUBLASMP_STATUS_ALLOCATION_FAILED:
      return Code::kResourceExhausted;
    case CUBLASMP_STATUS_NOT_INITIALIZED:
      return Code::kFailedPrecondition;
    default:
      return Code::kInternal;
  }
}

}  // namespace

StatusOr<std::shared_ptr<Plan>> Plan::Make(const MpApi& api, const Problem& problem,
                                           std::shared_ptr<const Communicator> communicator) {
  JAXMP_RETURN_IF_ERROR(CheckCapabilities(api, problem));
  JAXMP_ASSIGN_OR_RETURN(Layout layout, MakeLayout(problem));
  std::shared_ptr<Plan> plan(new Plan(api, problem, layout, std::move(communicator)));
  for (int rank = 0; rank < plan->nranks() && !plan->is_empty(); ++rank) {
    JAXMP_RETURN_IF_ERROR(plan->MakeRank(rank));
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
  for (int rank = 0; rank < nranks(); ++rank) ranks_.push_back(std::make_unique<Rank>());
}

const char* Plan::algorithm() const {
  switch (problem_.pattern) {
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

Status Plan::MakeRank(int number) {
  Rank& rank = *ranks_[static_cast<size_t>(number)];
  for (GridKind kind : {GridKind::kColumn, GridKind::kRow, GridKind::kProcess}) {
    JAXMP_RETURN_IF_ERROR(MakeGrid(number, kind));
  }
  JAXMP_RETURN_IF_ERROR(MakeMatrix(rank, layout_.a, problem_.dtype_a, &rank.a));
  JAXMP_RETURN_IF_ERROR(MakeMatrix(rank, layout_.b, problem_.dtype_b, &rank.b));
  if (problem_.has_c()) JAXMP_RETURN_IF_ERROR(MakeMatrix(rank, layout_.d, problem_.dtype_c, &rank.c));
  JAXMP_RETURN_IF_ERROR(MakeMatrix(rank, layout_.d, problem_.dtype_d, &rank.d));
  // The all-reduce sums what every rank adds of its C, which is the same C everywhere: one rank adds it.
  const bool adds_c = problem_.pattern != Pattern::kAllReduce || number == 0;
  rank.beta = MakeScalar(adds_c ? problem_.beta : 0.0);
  JAXMP_ASSIGN_OR_RETURN(std::unique_ptr<Slot> slot, MakeSlot());
  // The library checks pointers for null even where it only counts bytes.
  void* some = rank.beta.bytes;
  Buffers buffers;
  buffers.a = buffers.b = buffers.bias = buffers.aux_input = some;
  buffers.scale_a = buffers.scale_b = buffers.scale_c = buffers.scale_d = buffers.scale_aux = some;
  buffers.c = problem_.has_c() ? some : nullptr;
  buffers.d = buffers.aux = buffers.gradient = buffers.amax_d = buffers.amax_aux = buffers.d_out_scale = some;
  JAXMP_RETURN_IF_ERROR(SetPointers(*slot, buffers));
  JAXMP_RETURN_IF_ERROR(
      Call(api_.Matmul_bufferSize, "Matmul_bufferSize", rank, *slot, buffers, &rank.device_bytes, &rank.host_bytes));
  rank.free.push_back(std::move(slot));
  return {};
}

Status Plan::MakeGrid(int number, GridKind kind) {
  Rank& rank = *ranks_[static_cast<size_t>(number)];
  rank.grids.emplace_back(nullptr, api_.GridDestroy);
  if (kind != layout_.a.grid && kind != layout_.b.grid && kind != layout_.d.grid) return {};
  const int64_t nprow = kind == GridKind::kProcess ? communicator_->nprow() : kind == GridKind::kColumn ? nranks() : 1;
  const auto order = kind == GridKind::kRow ? CUBLASMP_GRID_LAYOUT_ROW_MAJOR : CUBLASMP_GRID_LAYOUT_COL_MAJOR;
  cublasMpGrid_t grid = nullptr;
  JAXMP_RETURN_IF_ERROR(
      Check(api_.GridCreate(nprow, nranks() / nprow, order, communicator_->comm(number), &grid), "GridCreate"));
  rank.grids.back().reset(grid);
  return {};
}

Status Plan::MakeMatrix(Rank& rank, const MatrixLayout& layout, DType dtype, Owned<cublasMpMatrixDescriptor>* matrix) {
  cublasMpMatrixDescriptor_t made = nullptr;
  const int64_t lld = std::max<int64_t>(1, layout.local_rows);
  JAXMP_RETURN_IF_ERROR(Check(api_.MatrixDescriptorCreate(layout.rows, layout.cols, layout.row_block, layout.col_block,
                                                          layout.row_source, layout.col_source, lld, CudaType(dtype),
                                                          rank.grids[static_cast<size_t>(layout.grid)].get(), &made),
                              "MatrixDescriptorCreate"));
  *matrix = {made, api_.MatrixDescriptorDestroy};
  return {};
}

StatusOr<std::unique_ptr<Plan::Slot>> Plan::MakeSlot() {
  auto slot = std::make_unique<Slot>();
  cublasMpHandle_t handle = nullptr;
  JAXMP_RETURN_IF_ERROR(Check(api_.Create(&handle, nullptr), "Create"));
  slot->handle = {handle, api_.Destroy};
  cublasMpMatmulDescriptor_t matmul = nullptr;
  JAXMP_RETURN_IF_ERROR(
      Check(api_.MatmulDescriptorCreate(&matmul, CublasCompute(problem_.compute)), "MatmulDescriptorCreate"));
  slot->matmul = {matmul, api_.MatmulDescriptorDestroy};
  JAXMP_RETURN_IF_ERROR(SetAttributes(*slot));
  return slot;
}

template <typename Value>
Status Plan::SetAttribute(Slot& slot, cublasMpMatmulDescriptorAttribute_t attribute, const Value& value) {
  return Check(api_.MatmulDescriptorSetAttribute(slot.matmul.get(), attribute, &value, sizeof(value)),
               "MatmulDescriptorSetAttribute");
}

Status Plan::SetAttributes(Slot& slot) {
  if (problem_.is_ordered()) JAXMP_RETURN_IF_ERROR(Check(api_.order_sums(slot.matmul.get()), "order_sums"));
  int32_t epilog = static_cast<int32_t>(problem_.epilog);
  if (problem_.pattern == Pattern::kAllReduce) epilog |= CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE;
  JAXMP_RETURN_IF_ERROR(SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, CublasOp(problem_.trans_a)));
  JAXMP_RETURN_IF_ERROR(SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, CublasOp(problem_.trans_b)));
  JAXMP_RETURN_IF_ERROR(SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, epilog));
  JAXMP_RETURN_IF_ERROR(SetHints(slot));
  if (problem_.has_bias() || problem_.has_gradient()) {
    JAXMP_RETURN_IF_ERROR(
        SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE, CudaType(problem_.dtype_bias)));
  }
  if (problem_.has_gradient()) {
    JAXMP_RETURN_IF_ERROR(
        SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME, CUBLASMP_RESULT_SCHEME_FULL));
  }
  JAXMP_RETURN_IF_ERROR(SetScaleModes(slot));
  if (!problem_.has_aux()) return {};
  if (problem_.dtype_aux != DType::kU8) {  // the RELU mask's type is fixed, and cuBLASMp refuses to be told
    JAXMP_RETURN_IF_ERROR(
        SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE, CudaType(problem_.dtype_aux)));
  }
  return SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, layout_.aux.attribute_ld);
}

Status Plan::SetHints(Slot& slot) {
  if (problem_.algorithm != Algorithm::kDefault) {
    JAXMP_RETURN_IF_ERROR(
        SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE, AlgoType(problem_.algorithm)));
  }
  if (problem_.comm_sm_count != 0) {
    const auto count = static_cast<int32_t>(problem_.comm_sm_count);
    JAXMP_RETURN_IF_ERROR(SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT, count));
  }
  if (problem_.communication_dtype == DType::kNone) return {};
  return SetAttribute(slot, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE,
                      CudaType(problem_.communication_dtype));
}

Status Plan::SetScaleModes(Slot& slot) {
  const std::pair<cublasMpMatmulDescriptorAttribute_t, ScaleMode> modes[] = {
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE, problem_.scale_mode_a},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE, problem_.scale_mode_b},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_MODE, problem_.scale_mode_c},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_MODE, problem_.scale_mode_d},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE, problem_.scale_mode_aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_MODE, problem_.d_out_scale_mode}};
  for (const auto& [attribute, mode] : modes) {
    if (mode != ScaleMode::kNone) JAXMP_RETURN_IF_ERROR(SetAttribute(slot, attribute, CublasScale(mode)));
  }
  return {};
}

Status Plan::SetPointers(Slot& slot, const Buffers& buffers) {
  const Problem& p = problem_;
  const auto has = [](ScaleMode mode) { return mode != ScaleMode::kNone; };
  const void* bias = p.has_gradient() ? buffers.gradient : buffers.bias;
  const void* aux = p.reads_aux() ? buffers.aux_input : buffers.aux;
  const std::tuple<cublasMpMatmulDescriptorAttribute_t, bool, const void*> pointers[] = {
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER, p.has_bias() || p.has_gradient(), bias},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, p.has_aux(), aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER, has(p.scale_mode_a), buffers.scale_a},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER, has(p.scale_mode_b), buffers.scale_b},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_POINTER, has(p.scale_mode_c), buffers.scale_c},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER, has(p.scale_mode_d), buffers.scale_d},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER, has(p.scale_mode_aux), buffers.scale_aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER, p.amax_d != 0, buffers.amax_d},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER, p.amax_aux != 0, buffers.amax_aux},
      {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_POINTER, has(p.d_out_scale_mode), buffers.d_out_scale}};
  for (const auto& [attribute, is_used, pointer] : pointers) {
    if (is_used) JAXMP_RETURN_IF_ERROR(SetAttribute(slot, attribute, pointer));
  }
  return {};
}

Status Plan::AllocateWorkspace(const Rank& rank, Slot& slot) {
  const auto allocate = [](size_t bytes, auto* pointer) {
    if (bytes == 0) return true;
    const size_t rounded = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    pointer->reset(std::aligned_alloc(kWorkspaceAlignment, rounded));
    return *pointer != nullptr;
  };
  if (NeedsRegisteredWorkspace(problem_)) {
    cublasMpGrid_t grid = rank.grids[static_cast<size_t>(layout_.d.grid)].get();
    void* made = nullptr;
    JAXMP_RETURN_IF_ERROR(Check(api_.Malloc(grid, &made, std::max<size_t>(1, rank.device_bytes)), "Malloc"));
    slot.device_work = {made, [free = api_.Free, grid](void* work) { (void)free(grid, work); }};
    slot.has_workspace = allocate(rank.host_bytes, &slot.host_work);
  } else {
    slot.has_workspace = allocate(rank.device_bytes, &slot.device_work) && allocate(rank.host_bytes, &slot.host_work);
  }
  if (slot.has_workspace) return {};
  return ResourceExhausted("jaxmp: no memory for a workspace of " + std::to_string(rank.device_bytes) + " + " +
                           std::to_string(rank.host_bytes) + " bytes of " + ToString(problem_));
}

template <typename Function, typename... Rest>
Status Plan::Call(Function function, const char* name, const Rank& rank, Slot& slot, const Buffers& buffers,
                  Rest... rest) {
  const cublasMpMatrixDescriptor_t c = buffers.c ? rank.c.get() : nullptr;
  return Check(function(slot.handle.get(), slot.matmul.get(), problem_.m, problem_.n, problem_.k, alpha_.bytes,
                        buffers.a, 1, 1, rank.a.get(), buffers.b, 1, 1, rank.b.get(), rank.beta.bytes, buffers.c, 1, 1,
                        c, buffers.d, 1, 1, rank.d.get(), rest...),
               name);
}

Status Plan::Check(cublasMpStatus_t status, const char* call) const {
  if (status == CUBLASMP_STATUS_SUCCESS) return {};
  const char* why = api_.last_error();
  return {CodeOf(status),
          std::string("jaxmp: ") + api_.name + " " + call + ": " + (*why ? why : api_.GetStatusString(status))};
}

StatusOr<Plan::Lease> Plan::Take(int number) {
  Rank& rank = *ranks_[static_cast<size_t>(number)];
  std::unique_ptr<Slot> slot;
  {
    std::lock_guard<std::mutex> lock(rank.mutex);
    if (!rank.free.empty()) {
      slot = std::move(rank.free.back());
      rank.free.pop_back();
    }
  }
  if (!slot) {
    JAXMP_ASSIGN_OR_RETURN(slot, MakeSlot());
  }
  // A plan that is only described, never run, costs no workspace.
  if (!slot->has_workspace) JAXMP_RETURN_IF_ERROR(AllocateWorkspace(rank, *slot));
  return Lease(slot.release(), ReturnSlot{this, number});
}

void Plan::TakeBack(int number, Slot* slot) {
  Rank& rank = *ranks_[static_cast<size_t>(number)];
  std::lock_guard<std::mutex> lock(rank.mutex);
  rank.free.emplace_back(slot);
}

Status Plan::Run(int number, Slot& slot, const Buffers& buffers, cudaStream_t stream) {
  const Rank& rank = *ranks_[static_cast<size_t>(number)];
  JAXMP_RETURN_IF_ERROR(Check(api_.SetStream(slot.handle.get(), stream), "SetStream"));
  JAXMP_RETURN_IF_ERROR(SetPointers(slot, buffers));
  return Call(api_.Matmul, "Matmul", rank, slot, buffers, slot.device_work.get(), rank.device_bytes,
              slot.host_work.get(), rank.host_bytes);
}

}  // namespace jaxmp
