// The Python extension jaxmp._jaxmp: targets, versions, counters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/barrier/barrier.h"
#include "csrc/barrier/coordinator_proxy.h"
#include "csrc/base/schedule_noise.h"
#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"
#include "csrc/cuda/rank_context.h"
#include "csrc/ffi/cuda_matmul.h"
#include "csrc/ffi/deferred_product.h"
#include "csrc/ffi/host_grouped.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/ffi/process_calls.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/handles/grouped.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan_cache.h"
#include "csrc/shared_memory/arena.h"

namespace nb = nanobind;

namespace jaxmp {
namespace {

// The version of the boundary to the Python files; jaxmp/_src/platform/runtime/native.py has the same number.
constexpr int kAbiVersion = 18;

// ValueError for what a caller has passed, RuntimeError for what this process lacks.
void ThrowIfWrong(const Status& status) {
  if (!status.ok()) throw nb::value_error(status.message().c_str());
}
void ThrowIfFailed(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

template <typename T>
T OrThrow(StatusOr<T> result) {
  ThrowIfFailed(result.status());
  return *std::move(result);
}

nb::dict DictOf(std::initializer_list<std::pair<const char*, nb::object>> items) {
  nb::dict result;
  for (const auto& [key, value] : items) result[key] = value;
  return result;
}

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

nb::dict Stages(Handler instantiate, Handler execute) {
  return DictOf({{"instantiate", nb::capsule(reinterpret_cast<void*>(instantiate))},
                 {"execute", nb::capsule(reinterpret_cast<void*>(execute))}});
}

template <typename State>
nb::dict Type() {
  return DictOf({{"type_id", nb::capsule(&State::id, "xla.ffi.type_id")},
                 {"type_info", nb::capsule(&State::info, "xla.ffi.type_info")}});
}

nb::dict Registrations() {
  return DictOf({{"jaxmp_matmul", Stages(MatmulInstantiate, MatmulExecute)},
                 {"jaxmp_grouped", Stages(GroupedInstantiate, GroupedExecute)},
                 {"jaxmp_start_product", Stages(DeferredInstantiate, StartExecute)},
                 {"jaxmp_collect_product", Stages(DeferredInstantiate, CollectExecute)},
                 {"jaxmp_process_barrier", Stages(ProcessBarrierInstantiate, ProcessBarrierExecute)},
                 {"jaxmp_process_collective", Stages(ProcessCollectiveInstantiate, ProcessCollectiveExecute)}});
}

nb::dict Types() {
  return DictOf({{"jaxmp_site", Type<Site>()},
                 {"jaxmp_grouped_site", Type<GroupedSite>()},
                 {"jaxmp_deferred_site", Type<DeferredSite>()},
                 {"jaxmp_process_barrier_site", Type<ProcessBarrierSite>()},
                 {"jaxmp_process_collective_site", Type<ProcessCollectiveSite>()}});
}

nb::dict BlasInfo() {
  const hostmp::BlasLibrary blas = hostmp::blas_library();
  nb::dict result;
  result["library"] = blas.path;
  result["config"] = blas.config;
  for (DType type : {DType::kF32, DType::kF64, DType::kC64, DType::kC128, DType::kBF16, DType::kF16, DType::kS8}) {
    result[NameOf(type)] = hostmp::DescribeKernels(NumberOf(type));
  }
  result["instruction set"] = hostmp::instruction_set();
  return result;
}

// Names the kernel of a product on the host. Ranks multiply a small batch together, so n covers all of them.
std::string KernelOf(const Problem& p) {
  return hostmp::Describe(hostmp::KernelOf(
      {NumberOf(p.dtype_a), NumberOf(p.dtype_b), NumberOf(p.trans_a), p.n, p.fixed_reduction_order(), p.alpha == 1.0}));
}

nb::dict CapabilitiesOf(const Capabilities& of) {
  return DictOf({{"all_reduce_any_transposition", nb::bool_(of.all_reduce_any_transposition)},
                 {"grid_any_shape", nb::bool_(of.grid_any_shape)},
                 {"grid_epilogs", nb::bool_(of.grid_epilogs)},
                 {"complex_epilogs", nb::bool_(of.complex_epilogs)},
                 {"fixed_reduction_order", nb::bool_(of.fixed_reduction_order)},
                 {"precise_gelu", nb::bool_(of.precise_gelu)},
                 {"as_documented", nb::bool_(of.as_documented)}});
}

nb::dict PlanCacheInfo() {
  const CacheInfo info = plan_cache().info();
  return DictOf({{"hits", nb::int_(info.hits)},
                 {"misses", nb::int_(info.misses)},
                 {"size", nb::int_(info.size)},
                 {"capacity", nb::int_(info.capacity)}});
}

// On cuBLASMp the workspace is known once every rank of the communicator has asked for it, so it stays empty.
nb::dict DescribePlan(const nb::dict& attributes, const std::string& library) {
  Attributes decoded;
  for (const auto& [name, value] : attributes) {
    decoded[nb::cast<std::string>(name)] = nb::cast<Attribute>(value);
  }
  const StatusOr<Problem> problem = MakeProblem(decoded);
  ThrowIfWrong(problem.status());
  const bool is_host = library != kCublasMp;
  nb::list device, host;
  if (!is_host) ThrowIfWrong(MakeDistribution(*problem).status());
  if (is_host) {
    const StatusOr<std::shared_ptr<Plan>> plan = plan_cache().Get(host_api(), *problem);
    ThrowIfWrong(plan.status());
    for (int rank = 0; rank < (*plan)->nranks(); ++rank) {
      device.append((*plan)->device_workspace(rank));
      host.append((*plan)->host_workspace(rank));
    }
  }
  return DictOf({{"library", nb::str(is_host ? host_api().name : kCublasMp)},
                 {"algorithm", nb::str(NumberOf(problem->pattern))},
                 {"kernel", nb::str(is_host ? KernelOf(*problem).c_str() : "")},
                 {"nranks", nb::int_(problem->nranks())},
                 {"device_workspace", device},
                 {"host_workspace", host}});
}

void SetPlanLog(const nb::object& function) {
  if (function.is_none()) return plan_cache().set_log(nullptr);
  // Never released, as the function of SetExchange.
  const auto* const kept = new nb::object(function);
  plan_cache().set_log(new PlanCache::Log([kept](const std::string& line) {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire acquired;
    try {
      (*kept)(line);
    } catch (nb::python_error& error) {  // a handler's; the plan is made all the same
      error.discard_as_unraisable("jaxmp's log of plans");
    }
  }));
}

std::map<std::string, std::string> CublasMpInfo() {
  const cuda::Libraries* libraries = cuda::Loaded();
  return libraries ? libraries->info : std::map<std::string, std::string>();
}

StatusOr<std::string> CallPython(const nb::object& function, const std::string& key, const std::string* value,
                                 double timeout) {
  const nb::gil_scoped_acquire acquired;
  try {
    const nb::object bytes = value ? nb::object(nb::bytes(value->data(), value->size())) : nb::none();
    const nb::object result = function(key, bytes, timeout);
    if (nb::bytes read; nb::try_cast(result, read)) return std::string(read.c_str(), read.size());
    const std::string type = nb::cast<std::string>(result.type().attr("__name__"));
    return InvalidArgument("exchange: ", key, ": expected bytes, the callback returned ", type);
  } catch (nb::python_error& error) {
    return FailedPrecondition(nb::str(error.value()).c_str());
  } catch (const std::exception& error) {
    return Internal(error.what());
  }
}

void SetExchange(const nb::object& function) {
  if (function.is_none()) return cuda::SetExchange({});
  // Never released: XLA's threads may call it for as long as they live, which is longer than the interpreter.
  const auto* const kept = new nb::object(function);
  cuda::SetExchange([kept](const std::string& key, const std::string* value, double timeout) {
    return CallPython(*kept, key, value, timeout);
  });
}

nb::dict PeerDicts() {
  nb::dict result;
  for (const PeerState& state : PeerStates()) {
    result[nb::int_(state.process)] = DictOf({{"gone", nb::str(state.gone.c_str())},
                                              {"gone_for", nb::float_(state.gone_for)},
                                              {"is_clean", nb::bool_(state.is_clean)},
                                              {"silence", nb::float_(state.silence)}});
  }
  return result;
}

nb::bytes CallExchange(const std::string& key, const std::optional<nb::bytes>& value, double timeout) {
  const std::string text = value ? std::string(value->c_str(), value->size()) : "";
  const std::string result = OrThrow([&] {
    const nb::gil_scoped_release released;
    return cuda::CallExchange(key, value ? &text : nullptr, timeout);
  }());
  return nb::bytes(result.data(), result.size());
}

}  // namespace
}  // namespace jaxmp

NB_MODULE(_jaxmp, m) {
  using namespace jaxmp;  // NOLINT
  m.doc() = "jaxmp's compiled half; use it through jaxmp._src.platform.runtime.native.";
  m.def("version", [] { return JAXMP_VERSION; });
  m.def("abi_version", [] { return kAbiVersion; });
  m.def("jaxlib_version", [] { return JAXMP_JAXLIB_VERSION; }, "The jaxlib whose FFI headers this was built with.");
  m.def("registrations", &Registrations);
  m.def("types", &Types);
  m.def(
      "limit_instruction_set", [](const std::string& name) { ThrowIfWrong(hostmp::LimitInstructionSet(name)); },
      nb::arg("name"));
  m.def("load_blas", [](const std::string& path) { ThrowIfWrong(hostmp::LoadBlas(path.c_str())); }, nb::arg("path"));
  m.def("blas_info", &BlasInfo);
  m.def("capabilities", [] { return CapabilitiesOf(kHostCapabilities); });
  m.def("plan_cache_info", &PlanCacheInfo);
  m.def("plan_cache_clear", [] { plan_cache().Clear(); });
  m.def("set_plan_cache_capacity", [](size_t capacity) { plan_cache().set_capacity(capacity); });
  m.def("set_plan_log", &SetPlanLog, nb::arg("function").none());
  m.def("take_group_rows", [] {
    const hostmp::GroupRows rows = hostmp::TakeGroupRows();
    return nb::make_tuple(rows.largest, rows.mean);
  });
  m.def("describe_plan", &DescribePlan, nb::arg("attributes"), nb::arg("library") = "host");
  m.def("cuda_registrations",
        [] { return DictOf({{"jaxmp_matmul", Stages(CudaMatmulInstantiate, CudaMatmulExecute)}}); });
  m.def("cuda_types", [] { return DictOf({{"jaxmp_cuda_site", Type<CudaSite>()}}); });
  m.def(
      "load_cublasmp",
      [](const std::string& cublasmp, const std::string& nccl, const std::string& driver) {
        ThrowIfFailed(cuda::Load(cublasmp, nccl, driver));
      },
      nb::arg("cublasmp"), nb::arg("nccl"), nb::arg("driver"));
  m.def("cublasmp_info", &CublasMpInfo);
  m.def("cublasmp_capabilities", [] { return CapabilitiesOf({}); });
  m.def("set_cublasmp_log", &cuda::SetLogging, nb::arg("is_on"));
  m.def("cublasmp_log", &cuda::TakeLog);
  m.def("set_cuda_device_ids", &cuda::SetDeviceIds, nb::arg("ids"), "The global ids of this process's devices.");
  m.def("set_exchange", &SetExchange, nb::arg("function").none());
  m.def("exchange", &CallExchange, nb::arg("key"), nb::arg("value").none(), nb::arg("timeout"));
  m.def("set_timeout", &cuda::SetTimeout, nb::arg("seconds"));
  m.def(
      "set_sharing", [](bool may_share) { cuda::SetWait(may_share ? cuda::Wait::kOnHost : cuda::Wait::kOnStream); },
      nb::arg("may_share"));
  m.def(
      "start_barrier",
      [](int process, int nprocesses, double timeout) { StartBarrier({process, nprocesses, timeout}); },
      nb::arg("process"), nb::arg("nprocesses"), nb::arg("timeout"));
  m.def(
      "own_arena", [] { return OrThrow(DescribeLocalArena()); },
      "What the other processes of this machine need to share this one's memory.");
  m.def(
      "share_arena", [](int process, const std::string& described) { ThrowIfFailed(ShareArena(process, described)); },
      nb::arg("process"), nb::arg("described"));
  m.def("set_schedule_noise", &SetScheduleNoise, nb::arg("seed"), nb::arg("microseconds"), "For tests: random delays.");
  m.def("arena_use", [] {
    const ArenaUse use = LocalArenaUse();
    return DictOf({{"used", nb::int_(use.used)}, {"touched", nb::int_(use.touched)}});
  });
  m.def(
      "trim_memory",
      [](double unused_for) {
        TrimArenas(unused_for);
        TrimProducts(unused_for);
      },
      nb::arg("unused_for"), nb::call_guard<nb::gil_scoped_release>());
  m.def("want_processes", &WantProcesses, nb::arg("processes"));
  m.def("wanted_processes", &WantedProcesses, nb::call_guard<nb::gil_scoped_release>());
  m.def("connect_peer", &ConnectPeer, nb::arg("process"), nb::arg("fd"));
  m.def("lose_peer", &LosePeer, nb::arg("process"), nb::arg("gone"));
  m.def("leave_barrier", &LeaveBarrier, nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>());
  m.def("stop_barrier", &StopBarrier, nb::call_guard<nb::gil_scoped_release>());
  m.def("barrier_failure", &BarrierFailure);
  m.def("late_failure", &LateFailure);
  m.def("last_call", &LastCall);
  m.def("peers", &PeerDicts);
  m.def("service_lost_for", &ServiceLostFor);
  m.def(
      "start_coordinator_proxy",
      [](const std::string& host, const std::string& port) { return OrThrow(StartCoordinatorProxy(host, port)); },
      nb::arg("host"), nb::arg("port"));
}
