// The Python extension jaxmp._jaxmp: targets, versions, counters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>

#include "csrc/handlers.h"
#include "csrc/hostmp/host.h"
#include "csrc/mp_api.h"
#include "csrc/plan_cache.h"
#include "csrc/problem.h"
#include "csrc/rollcall/relay.h"
#include "csrc/rollcall/rollcall.h"
#include "csrc/rollcall_handlers.h"
#include "csrc/status.h"

namespace nb = nanobind;

namespace jaxmp {
namespace {

// The version of the boundary to the Python files; jaxmp/_native.py has the same number.
constexpr int kAbiVersion = 1;

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw nb::value_error(status.message().c_str());
}

nb::dict Registrations() {
  nb::dict bundle, targets;
  bundle["instantiate"] = nb::capsule(reinterpret_cast<void*>(MatmulInstantiate));
  bundle["execute"] = nb::capsule(reinterpret_cast<void*>(MatmulExecute));
  targets["jaxmp_matmul"] = bundle;
  nb::dict roll_call;
  roll_call["instantiate"] = nb::capsule(reinterpret_cast<void*>(RollCallInstantiate));
  roll_call["execute"] = nb::capsule(reinterpret_cast<void*>(RollCallExecute));
  targets["jaxmp_roll_call"] = roll_call;
  return targets;
}

nb::dict Types() {
  nb::dict site, types;
  site["type_id"] = nb::capsule(&Site::id, "xla.ffi.type_id");
  site["type_info"] = nb::capsule(&Site::info, "xla.ffi.type_info");
  types["jaxmp_site"] = site;
  nb::dict roll_call;
  roll_call["type_id"] = nb::capsule(&RollCallSite::id, "xla.ffi.type_id");
  roll_call["type_info"] = nb::capsule(&RollCallSite::info, "xla.ffi.type_info");
  types["jaxmp_roll_call_site"] = roll_call;
  return types;
}

void LoadBlas(const std::string& path, const std::optional<std::string>& mkl_path) {
  ThrowIfError(hostmp::load_blas(path.c_str(), mkl_path.value_or("").c_str()));
}

nb::dict BlasInfo() {
  const hostmp::BlasInfo info = hostmp::blas_info();
  nb::dict result;
  for (const auto& [name, value] :
       {std::pair("library", &info.library), std::pair("config", &info.config), std::pair("mkl", &info.mkl),
        std::pair("f32", &info.f32), std::pair("f64", &info.f64), std::pair("c64", &info.c64),
        std::pair("c128", &info.c128), std::pair("bf16", &info.bf16), std::pair("f16", &info.f16)}) {
    result[name] = *value;
  }
  return result;
}

nb::dict LibraryCapabilities() {
  const Capabilities& capabilities = host_api().capabilities;
  nb::dict result;
  result["all_reduce_any_transposition"] = capabilities.all_reduce_any_transposition;
  result["grid_any_shape"] = capabilities.grid_any_shape;
  result["grid_epilogs"] = capabilities.grid_epilogs;
  return result;
}

nb::dict PlanCacheInfo() {
  const CacheInfo info = plan_cache().info();
  nb::dict result;
  result["hits"] = info.hits;
  result["misses"] = info.misses;
  result["size"] = info.size;
  result["capacity"] = info.capacity;
  return result;
}

nb::dict DescribePlan(const nb::dict& attributes) {
  Attributes decoded;
  for (const auto& [name, value] : attributes) {
    decoded[nb::cast<std::string>(name)] = nb::cast<Attribute>(value);
  }
  const StatusOr<Problem> problem = MakeProblem(decoded);
  ThrowIfError(problem.status());
  const StatusOr<std::shared_ptr<Plan>> plan = plan_cache().Get(host_api(), *problem);
  ThrowIfError(plan.status());
  nb::dict result;
  nb::list device, host;
  for (int rank = 0; rank < (*plan)->nranks(); ++rank) {
    device.append((*plan)->device_workspace(rank));
    host.append((*plan)->host_workspace(rank));
  }
  result["library"] = host_api().name;
  result["algorithm"] = (*plan)->algorithm();
  result["nranks"] = (*plan)->nranks();
  result["device_workspace"] = device;
  result["host_workspace"] = host;
  return result;
}

void StartRollCallWith(int process, const std::vector<int>& sockets, double timeout, bool compares, int interrupts) {
  StartRollCall({process, sockets, timeout, compares, interrupts});
}

nb::list PeerDicts() {
  nb::list result;
  for (const PeerState& state : PeerStates()) {
    nb::dict peer;
    peer["gone"] = state.gone;
    peer["is_clean"] = state.is_clean;
    peer["silence"] = state.silence;
    result.append(peer);
  }
  return result;
}

int StartRelayTo(const std::string& host, const std::string& port) {
  const StatusOr<int> relay = StartRelay(host, port);
  ThrowIfError(relay.status());
  return *relay;
}

}  // namespace
}  // namespace jaxmp

NB_MODULE(_jaxmp, m) {
  using namespace jaxmp;  // NOLINT
  m.doc() = "jaxmp's compiled half; use it through jaxmp._native.";
  m.def("version", [] { return JAXMP_VERSION; });
  m.def("abi_version", [] { return kAbiVersion; });
  m.def("jaxlib_version", [] { return JAXMP_JAXLIB_VERSION; }, "The jaxlib whose FFI headers this was built with.");
  m.def("registrations", &Registrations);
  m.def("types", &Types);
  m.def("load_blas", &LoadBlas, nb::arg("path"), nb::arg("mkl_path").none());
  m.def("blas_info", &BlasInfo);
  m.def("capabilities", &LibraryCapabilities);
  m.def("plan_cache_info", &PlanCacheInfo);
  m.def("plan_cache_clear", [] { plan_cache().Clear(); });
  m.def("set_plan_cache_capacity", [](size_t capacity) { plan_cache().set_capacity(capacity); });
  m.def("set_plan_log", [](bool is_on) { plan_cache().set_log(is_on); });
  m.def("describe_plan", &DescribePlan, nb::arg("attributes"));
  m.def("start_roll_call", &StartRollCallWith, nb::arg("process"), nb::arg("sockets"), nb::arg("timeout"),
        nb::arg("compares"), nb::arg("interrupts"));
  m.def("leave_roll_call", &LeaveRollCall, nb::arg("reason"));
  m.def("stop_roll_call", &StopRollCall, nb::call_guard<nb::gil_scoped_release>());
  m.def("roll_call_failure", &RollCallFailure);
  m.def("last_call", &LastCall);
  m.def("peers", &PeerDicts);
  m.def("start_relay", &StartRelayTo, nb::arg("host"), nb::arg("port"));
}
