#include "csrc/ffi/host_grouped.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/ffi/call_frame.h"
#include "csrc/ffi/host_call.h"
#include "csrc/hostmp/handles/grouped.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/matmul_problem.h"

namespace ffi = xla::ffi;

namespace jaxmp {
namespace {

StatusOr<std::unique_ptr<GroupedSite>> MakeGroupedSite(const ffi::Dictionary& attributes) {
  auto site = std::make_unique<GroupedSite>();
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "is_contraction", &site->is_contraction));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "is_transposed", &site->is_transposed));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "is_fixed_order", &site->is_fixed_order));
  Axes axes;
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "mesh_shape", &axes.mesh_shape));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "axes_row", &axes.row));
  JAXMP_RETURN_IF_ERROR(CheckMesh(axes.mesh_shape, axes.row, axes.col));
  site->communicator = GetCommunicator(axes);
  return site;
}

StatusOr<abi::cudaDataType_t> TypeOf(const ffi::AnyBuffer& buffer) {
  const ffi::DataType type = buffer.element_type();
  if (const DType found = DTypeOf(type); found != DType::kNone) return NumberOf(found);
  return InvalidArgument("jaxmp: a grouped product of XLA's type ", static_cast<int>(type));
}

using Shape = std::vector<int64_t>;

Shape ShapeOf(const ffi::AnyBuffer& x) { return {x.dimensions().begin(), x.dimensions().end()}; }

// Checks that an argument's shape is (batch, *rest) or (1, *rest). True if the first extent is not 1.
StatusOr<bool> CheckShape(const char* name, const ffi::AnyBuffer& x, int64_t batch, const Shape& rest) {
  const Shape shape = ShapeOf(x);
  const bool is_like = shape.size() == rest.size() + 1 && std::equal(rest.begin(), rest.end(), shape.begin() + 1);
  if (is_like && (shape[0] == batch || shape[0] == 1)) return shape[0] != 1;
  return InvalidArgument("jaxmp: argument ", name, " of a grouped product has a shape that does not fit");
}

class GroupedInFlight final : public InFlightCall {
 public:
  GroupedInFlight(const hostmp::GroupedProduct& product, int nranks) : product_(product), nranks_(nranks) {}

 private:
  Status Start(int rank, hostmp::Stream& stream) override {
    return hostmp::MultiplyGroups(product_, stream, rank, nranks_);
  }

  const hostmp::GroupedProduct product_;
  const int nranks_;
};

StatusOr<hostmp::GroupedProduct> ReadCall(const GroupedSite& site, const ffi::RemainingArgs& args,
                                          ffi::RemainingRets& rets, GroupRank* group_rank) {
  const int64_t nranks = site.communicator->nranks();
  if (args.size() != (nranks > 1 ? 4 : 3) || rets.size() != 1) {
    return InvalidArgument("jaxmp: a grouped product takes x, w, bounds and, of several ranks, a position, got ",
                           args.size(), " arguments");
  }
  const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), w = *args.get<ffi::AnyBuffer>(1);
  const ffi::AnyBuffer bounds = *args.get<ffi::AnyBuffer>(2), d = **rets.get<ffi::AnyBuffer>(0);
  const Shape of_x = ShapeOf(x), of_w = ShapeOf(w), of_d = ShapeOf(d), of_bounds = ShapeOf(bounds);
  const size_t w_rank = site.is_contraction ? 3 : 4, d_rank = site.is_contraction ? 4 : 3;
  if (of_x.size() != 3 || of_w.size() != w_rank || of_d.size() != d_rank || of_bounds.size() != 2 ||
      of_bounds[1] % nranks != 1 % nranks || of_bounds[1] < 1 || bounds.element_type() != ffi::S32) {
    return InvalidArgument("jaxmp: arguments of a grouped product have ranks or types that do not fit");
  }
  hostmp::GroupedProduct p{};
  p.is_contraction = site.is_contraction != 0;
  p.is_transposed = site.is_transposed != 0;
  p.is_fixed_order = site.is_fixed_order != 0;
  p.batch = of_d[0], p.matrices = (of_bounds[1] - 1) / nranks, p.m = of_x[1], p.k = of_x[2], p.n = of_d.back();
  for (const int64_t extent : {p.m, p.k, p.n}) {
    if (extent > INT32_MAX) return InvalidArgument("jaxmp: extent ", extent, " of a grouped product is too large");
  }
  const Shape matrices = p.is_transposed ? Shape{p.matrices, p.n, p.k} : Shape{p.matrices, p.k, p.n};
  const Shape rows = {p.m, p.n};
  JAXMP_ASSIGN_OR_RETURN(p.has_x_batch, CheckShape("x", x, p.batch, {p.m, p.k}));
  JAXMP_ASSIGN_OR_RETURN(p.has_w_batch, CheckShape("w", w, p.batch, p.is_contraction ? rows : matrices));
  JAXMP_ASSIGN_OR_RETURN(p.has_bounds_batch, CheckShape("bounds", bounds, p.batch, {of_bounds[1]}));
  JAXMP_RETURN_IF_ERROR(CheckShape("d", d, p.batch, p.is_contraction ? Shape{p.matrices, p.k, p.n} : rows).status());
  JAXMP_ASSIGN_OR_RETURN(p.type, TypeOf(x));
  JAXMP_ASSIGN_OR_RETURN(p.type_w, TypeOf(w));
  JAXMP_ASSIGN_OR_RETURN(p.out, TypeOf(d));
  p.x = x.untyped_data(), p.w = w.untyped_data(), p.d = d.untyped_data();
  p.bounds = static_cast<const int32_t*>(bounds.untyped_data());
  int64_t position = 0;
  if (nranks > 1) {
    JAXMP_ASSIGN_OR_RETURN(const void* given, PositionAt(args, 3));
    position = *static_cast<const uint32_t*>(given);
  }
  JAXMP_ASSIGN_OR_RETURN(*group_rank, site.communicator->Find(position));
  return p;
}

Outcome RunGrouped(GroupedSite* site, ffi::RunId run, ffi::ThreadPool threads, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  GroupRank group_rank{};
  // An error here occurs on every device, because all run one program: each returns the error, and none waits.
  const StatusOr<hostmp::GroupedProduct> product = ReadCall(*site, args, rets, &group_rank);
  if (!product.ok()) return {ToError(product.status())};
  const int nranks = site->communicator->nranks();
  return RunRank(std::make_unique<GroupedInFlight>(*product, nranks), site->rendezvous, run,
                 static_cast<int>(threads.num_threads()), group_rank, nranks);
}

}  // namespace

XLA_FFI_Error* GroupedInstantiate(XLA_FFI_CallFrame* frame) { return Instantiate<GroupedSite, MakeGroupedSite>(frame); }

XLA_FFI_Error* GroupedExecute(XLA_FFI_CallFrame* frame) {
  return Execute<GroupedSite, RunGrouped, ffi::RunId, ffi::ThreadPool>(frame);
}

}  // namespace jaxmp
