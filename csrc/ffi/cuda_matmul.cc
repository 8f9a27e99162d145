#include "csrc/ffi/cuda_matmul.h"

#include <exception>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/cuda/libraries.h"
#include "csrc/cuda/watchdog.h"
#include "csrc/ffi/call_frame.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan_cache.h"

namespace ffi = xla::ffi;

namespace jaxmp {

CudaSite::CudaSite(Problem made)
    : problem(std::move(made)), text(std::make_shared<const std::string>("[" + ToString(problem) + "]")) {}

namespace {

// ---- instantiate

std::shared_ptr<const cuda::CudaCommunicator> CommunicatorOf(const Problem& p) {
  // A group of one rank needs no mesh.
  if (p.nranks() == 1) return cuda::GetCudaCommunicator({{}, {}, {}}, {});
  return cuda::GetCudaCommunicator({p.mesh_shape, p.axes_row, p.axes_col}, p.devices);
}

StatusOr<std::unique_ptr<CudaSite>> MakeCudaSite(const ffi::Dictionary& dictionary) {
  JAXMP_ASSIGN_OR_RETURN(Attributes attributes, ReadAttributes(dictionary));
  JAXMP_ASSIGN_OR_RETURN(Problem problem, MakeProblem(attributes));
  JAXMP_RETURN_IF_ERROR(MakeDistribution(problem).status());
  auto site = std::make_unique<CudaSite>(std::move(problem));
  if (cuda::Loaded()) JAXMP_RETURN_IF_ERROR(site->Open());
  return site;
}

// ---- execute

abi::CUdeviceptr DevicePointer(const void* pointer) { return reinterpret_cast<abi::CUdeviceptr>(pointer); }

Status Zero(void* at, size_t bytes, abi::CUstream stream) {
  return cuda::Check(cuda::Loaded()->driver.MemsetD8Async(DevicePointer(at), 0, bytes, stream), "cuMemsetD8Async");
}

Status ZeroAmax(const Buffers& buffers, abi::CUstream stream) {
  for (void* amax : {buffers.amax_d, buffers.amax_aux}) {
    if (amax) JAXMP_RETURN_IF_ERROR(Zero(amax, sizeof(float), stream));
  }
  return {};
}

// Returns the position, from the attributes or from the device's memory. Only a device's first call reads it there.
StatusOr<int64_t> FindPosition(const Problem& p, int ordinal, const void* position, abi::CUstream stream) {
  if (!p.devices.empty()) return cuda::PositionOf(p.devices, ordinal);
  int32_t at = 0;
  if (!position) return at;
  const cuda::Driver& driver = cuda::Loaded()->driver;
  JAXMP_RETURN_IF_ERROR(
      cuda::Check(driver.MemcpyDtoHAsync_v2(&at, DevicePointer(position), sizeof(at), stream), "cuMemcpyDtoHAsync"));
  JAXMP_RETURN_IF_ERROR(cuda::Check(driver.StreamSynchronize(stream), "cuStreamSynchronize"));
  return at;
}

StatusOr<abi::CUcontext> ContextOf(abi::CUstream stream) {
  abi::CUcontext context = nullptr;
  JAXMP_RETURN_IF_ERROR(cuda::Check(cuda::Loaded()->driver.StreamGetCtx(stream, &context), "cuStreamGetCtx"));
  return context;
}

StatusOr<CudaSite::Place> PlaceOf(CudaSite& site, int ordinal, const void* position, abi::CUstream stream) {
  {
    std::lock_guard<std::mutex> lock(site.mutex);
    if (const auto found = site.places.find(ordinal); found != site.places.end()) return found->second;
  }
  CudaSite::Place place;
  JAXMP_ASSIGN_OR_RETURN(place.context, ContextOf(stream));
  const cuda::CurrentContext current(place.context);
  JAXMP_ASSIGN_OR_RETURN(const int64_t at, FindPosition(site.problem, ordinal, position, stream));
  JAXMP_ASSIGN_OR_RETURN(place.local_rank, site.communicator->LocalRankOf(at, ordinal));
  std::lock_guard<std::mutex> lock(site.mutex);
  site.places[ordinal] = place;
  return place;
}

// Clears results that the library may leave unwritten or only raise: the padding of an aux matrix (cuBLASMp also needs
// RELU_AUX's mask zeroed before AllGather + Matmul), and the largest values.
Status ZeroResults(const Plan& plan, const Buffers& buffers, abi::CUstream stream) {
  const Problem& p = plan.problem();
  const AuxLayout& aux = plan.distribution().aux;
  const bool is_mask = p.dtype_aux == DType::kU8;
  if (buffers.aux && (is_mask || aux.attribute_ld != plan.distribution().d.local_rows)) {
    JAXMP_RETURN_IF_ERROR(Zero(buffers.aux, static_cast<size_t>(BytesOf(p.dtype_aux, aux.local_size)), stream));
  }
  return ZeroAmax(buffers, stream);
}

// Gives the execution context back as soon as everything is on the stream, because the local rank's next call is queued
// after it.
Status RunOnLocalRank(CudaSite& site, int local_rank, const Buffers& buffers, abi::CUstream stream) {
  Plan& plan = *site.plan;
  cuda::RankContext& rank_context = site.communicator->rank_context(local_rank);
  cuda::Watch& watch = rank_context.watch();
  if (!plan.is_made(local_rank)) JAXMP_RETURN_IF_ERROR(rank_context.Compare(plan.problem(), *site.text));
  JAXMP_ASSIGN_OR_RETURN(const Plan::ExecutionHandle execution, plan.Take(local_rank, buffers, stream));
  JAXMP_RETURN_IF_ERROR(ZeroResults(plan, buffers, stream));
  JAXMP_RETURN_IF_ERROR(watch.Begin(stream));
  JAXMP_RETURN_IF_ERROR(rank_context.MeetBefore());
  JAXMP_RETURN_IF_ERROR(plan.Run(local_rank, *execution, buffers, stream));
  JAXMP_RETURN_IF_ERROR(watch.End(stream));
  return rank_context.MeetAfter();
}

Status ExecuteOnLocalRank(CudaSite& site, const CudaSite::Place& place, int ordinal, const Buffers& buffers,
                          abi::CUstream stream) {
  cuda::RankContext& rank_context = site.communicator->rank_context(place.local_rank);
  const cuda::CurrentContext current(place.context);
  const cuda::CallScope scope(rank_context);
  Status status = rank_context.Enter(ordinal, place.context, stream, site.text);
  if (status.ok()) status = RunOnLocalRank(site, place.local_rank, buffers, stream);
  if (status.ok()) return {};
  return Status(status.code(), status.message() + "; " + rank_context.Describe() + ", call " + *site.text);
}

Status WriteNothing(const Buffers& buffers, abi::CUstream stream) {
  JAXMP_ASSIGN_OR_RETURN(abi::CUcontext const context, ContextOf(stream));
  const cuda::CurrentContext current(context);
  return ZeroAmax(buffers, stream);
}

Status ExecuteChecked(CudaSite& site, int ordinal, abi::CUstream stream, const ffi::RemainingArgs& args,
                      const ffi::RemainingRets& rets) {
  JAXMP_RETURN_IF_ERROR(site.Open());
  const Plan& plan = *site.plan;
  Buffers buffers;
  const void* position = nullptr;
  JAXMP_RETURN_IF_ERROR(ReadOperands(plan.problem(), plan.distribution(), args, rets, &buffers, &position));
  if (plan.is_empty()) return WriteNothing(buffers, stream);
  JAXMP_ASSIGN_OR_RETURN(const CudaSite::Place place, PlaceOf(site, ordinal, position, stream));
  return ExecuteOnLocalRank(site, place, ordinal, buffers, stream);
}

ffi::Error RunCuda(CudaSite* site, int32_t ordinal, abi::CUstream stream, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  try {
    return ToError(ExecuteChecked(*site, ordinal, stream, args, rets));
  } catch (const std::exception& exception) {  // out of memory
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jaxmp: ") + exception.what());
  }
}

}  // namespace

Status CudaSite::Open() {
  if (is_open_.load(std::memory_order_acquire)) return {};
  std::lock_guard<std::mutex> lock(mutex);
  if (plan) return {};
  JAXMP_ASSIGN_OR_RETURN(const MpApi* api, cuda::cuda_api());
  const auto make = [](const Problem& p) -> std::shared_ptr<const Communicator> { return CommunicatorOf(p); };
  communicator = CommunicatorOf(problem);
  JAXMP_ASSIGN_OR_RETURN(plan, plan_cache().Get(*api, problem, make));
  is_open_.store(true, std::memory_order_release);
  return {};
}

XLA_FFI_Error* CudaMatmulInstantiate(XLA_FFI_CallFrame* frame) { return Instantiate<CudaSite, MakeCudaSite>(frame); }

XLA_FFI_Error* CudaMatmulExecute(XLA_FFI_CallFrame* frame) {
  return Execute<CudaSite, RunCuda, ffi::DeviceOrdinal, ffi::PlatformStream<abi::CUstream>>(frame);
}

}  // namespace jaxmp
