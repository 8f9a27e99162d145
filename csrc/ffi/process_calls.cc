#include "csrc/ffi/process_calls.h"

#include <complex>
#include <cstdint>
#include <cstring>
#include <vector>

#include "csrc/barrier/barrier.h"
#include "csrc/base/status.h"
#include "csrc/ffi/call_frame.h"

namespace ffi = xla::ffi;

namespace jaxmp {
namespace {

// A process barrier counts processes in 32 bits.
Status CheckProcesses(const std::vector<int64_t>& processes) {
  for (int64_t process : processes) {
    if (process >= 0 && process <= INT32_MAX) continue;
    return InvalidArgument("jaxmp: attribute processes of a process barrier must count from 0, got ", process);
  }
  return {};
}

// Reads the attributes of a process barrier; `has_tokens` as in CallSignature.
StatusOr<std::shared_ptr<const CallSignature>> ReadSignature(const ffi::Dictionary& attributes, bool has_tokens) {
  CallSignature signature;
  int64_t is_sequential = 0;
  Status status;
  const auto read = [&](const char* name, auto* to) {
    if (status.ok()) status = ReadAttribute(attributes, name, to);
  };
  read("program", &signature.program);
  read("index", &signature.index);
  read("repeat", &signature.repeat);
  read("call", &signature.call);
  read("fields", &signature.fields);
  read("devices", &signature.devices);
  read("processes", &signature.processes);
  read("groups", &signature.groups);
  read("is_sequential", &is_sequential);
  JAXMP_RETURN_IF_ERROR(status);
  JAXMP_RETURN_IF_ERROR(CheckProcesses(signature.processes));
  signature.is_sequential = is_sequential != 0;
  signature.has_tokens = has_tokens;
  return Prepare(std::move(signature));
}

// ---- a barrier

StatusOr<std::unique_ptr<ProcessBarrierSite>> MakeBarrierSite(const ffi::Dictionary& attributes) {
  JAXMP_ASSIGN_OR_RETURN(auto signature, ReadSignature(attributes, /*has_tokens=*/false));
  ExpectCall(*signature);
  return std::make_unique<ProcessBarrierSite>(std::move(signature));
}

Status CopyOperands(const ffi::RemainingArgs& args, ffi::RemainingRets& rets) {
  if (args.size() != rets.size() + 1) {
    return InvalidArgument("jaxmp: a process barrier takes its results and a position, got ", args.size(),
                           " arguments for ", rets.size(), " results");
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto from = args.get<ffi::AnyBuffer>(i);
    auto to = rets.get<ffi::AnyBuffer>(i);
    if (from.has_error()) return InvalidArgument(from.error().message());
    if (to.has_error()) return InvalidArgument(to.error().message());
    if (from->size_bytes() != (*to)->size_bytes()) {
      return InvalidArgument("jaxmp: argument ", i, " of a process barrier has ", from->size_bytes(),
                             " bytes, its result ", (*to)->size_bytes());
    }
    if (from->size_bytes() != 0 && from->untyped_data() != (*to)->untyped_data()) {
      std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    }
  }
  return {};
}

Status Wait(const ProcessBarrierSite& site, const ffi::RunId& run, const ffi::RemainingArgs& args,
            ffi::RemainingRets& rets) {
  JAXMP_RETURN_IF_ERROR(CopyOperands(args, rets));
  JAXMP_ASSIGN_OR_RETURN(const void* position, PositionAt(args, rets.size()));
  return ArriveForAMoment(site.signature, {&site, run.run_id}, *static_cast<const int32_t*>(position));
}

ffi::Error RunBarrier(ProcessBarrierSite* site, ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return ToError(Wait(*site, run, args, rets));
}

// ---- a collective

template <typename T>
void AddAs(void* z, const void* x, const void* y, size_t count) {
  const T *left = static_cast<const T*>(x), *right = static_cast<const T*>(y);
  T* sum = static_cast<T*>(z);
  for (size_t i = 0; i < count; ++i) sum[i] = static_cast<T>(left[i] + right[i]);
}

struct Element {
  size_t bytes;
  Add add;  // null for types that are not summed
};

// The types of accumulators are summed, integers modulo 2^bits.
Element ElementOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return {4, AddAs<float>};
    case ffi::F64:
      return {8, AddAs<double>};
    case ffi::C64:
      return {8, AddAs<std::complex<float>>};
    case ffi::C128:
      return {16, AddAs<std::complex<double>>};
    case ffi::S32:
    case ffi::U32:
      return {4, AddAs<uint32_t>};
    case ffi::S64:
    case ffi::U64:
      return {8, AddAs<uint64_t>};
    default:
      return {1, nullptr};
  }
}

StatusOr<CollectivePart> PartOf(const std::string& name) {
  if (name == "all") return CollectivePart::kAll;
  if (name == "write") return CollectivePart::kWrite;
  if (name == "read") return CollectivePart::kRead;
  return InvalidArgument("jaxmp: attribute part of a collective must be all, write or read, got ", name);
}

StatusOr<std::unique_ptr<ProcessCollectiveSite>> MakeCollectiveSite(const ffi::Dictionary& attributes) {
  SharedCollective call;
  int64_t outer = 0, sums = 0, picks = 0;
  std::string part_name;
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "part", &part_name));
  JAXMP_ASSIGN_OR_RETURN(const CollectivePart part, PartOf(part_name));
  JAXMP_ASSIGN_OR_RETURN(call.signature, ReadSignature(attributes, /*has_tokens=*/true));
  if (part == CollectivePart::kAll) ExpectCall(*call.signature);
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "ranks", &call.ranks));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "outer", &outer));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "sums", &sums));
  JAXMP_RETURN_IF_ERROR(ReadAttribute(attributes, "picks", &picks));
  call.outer = outer > 0 ? static_cast<size_t>(outer) : 0;
  call.sums = sums != 0, call.picks = picks != 0;
  JAXMP_RETURN_IF_ERROR(CheckCollective(call));
  return std::make_unique<ProcessCollectiveSite>(std::make_shared<const SharedCollective>(std::move(call)), part);
}

StatusOr<CollectiveArrays> Decode(const SharedCollective& call, const ffi::AnyBuffer& operand, ffi::AnyBuffer result) {
  const Element element = ElementOf(operand.element_type());
  if (call.sums && !element.add) return InvalidArgument("jaxmp: a collective does not sum elements of this type");
  return CollectiveArrays{static_cast<const char*>(operand.untyped_data()),
                          operand.size_bytes(),
                          static_cast<char*>(result.untyped_data()),
                          result.size_bytes(),
                          call.sums ? element.bytes : 1,
                          element.add,
                          {}};
}

// Reads the tables of a collective that picks rows, arguments from `index` on; x has rows.
StatusOr<Picks> ReadPicks(const ffi::RemainingArgs& args, size_t index, size_t nranks, const ffi::AnyBuffer& x) {
  const auto written = args.get<ffi::AnyBuffer>(index), table = args.get<ffi::AnyBuffer>(index + 1);
  const bool is_right = written.has_value() && table.has_value() && written->element_type() == ffi::S32 &&
                        table->element_type() == ffi::S32 && written->element_count() == nranks &&
                        table->element_count() % 4 == 0 && x.dimensions().size() > 0 && x.dimensions()[0] > 0;
  if (!is_right) return InvalidArgument("jaxmp: a collective of rows takes rows, int32 by rank, and a table of int32");
  return Picks{static_cast<const int32_t*>(written->untyped_data()), static_cast<const int32_t*>(table->untyped_data()),
               table->element_count() / 4, x.size_bytes() / static_cast<size_t>(x.dimensions()[0])};
}

// Checks the places of `nranks` ranks: for each rank the token of what it wrote, and its run.
StatusOr<uint64_t*> Places(const ffi::AnyBuffer& places, size_t nranks) {
  if (places.element_type() == ffi::U64 && places.element_count() == 2 * nranks) {
    return static_cast<uint64_t*>(places.untyped_data());
  }
  return InvalidArgument("jaxmp: a collective's places must be ", 2 * nranks, " of uint64");
}

// Returns the tokens by rank. An error if XLA's all-gather brings another run's places: two threads run programs then.
StatusOr<std::vector<uint64_t>> TokensOf(const SharedCollective& call, int32_t position, int64_t run,
                                         const uint64_t* places) {
  const CallSignature& signature = *call.signature;
  const auto group = static_cast<size_t>(signature.groups[static_cast<size_t>(position)]);
  const std::vector<int64_t>& positions = signature.members[group].positions;
  std::vector<uint64_t> tokens(positions.size());
  for (const int64_t other : positions) {
    const auto rank = static_cast<size_t>(call.ranks[static_cast<size_t>(other)]);
    const auto process = static_cast<int>(signature.processes[static_cast<size_t>(other)]);
    tokens[rank] = places[2 * rank];
    if (IsOneRun(run, process, places[2 * rank + 1])) continue;
    return FailedPrecondition("jaxmp.DistributedError: ", signature.call, ": rank ", process,
                              " brings its rows of run ", places[2 * rank + 1], " of the program to run ",
                              static_cast<uint32_t>(run), "; XLA's collectives in loops take one thread at a time");
  }
  return tokens;
}

Status Start(const ProcessCollectiveSite& site, const ffi::RunId& run, const ffi::RemainingArgs& args,
             const ffi::RemainingRets& rets, std::function<void(const Status&)> done) {
  const SharedCollective& call = *site.call;
  const bool is_read = site.part == CollectivePart::kRead;
  const size_t ntokens = is_read ? 1 : 0, ntables = call.picks ? 2 : 0;
  if (args.size() != 2 + ntokens + ntables || rets.size() != 1) {
    return InvalidArgument("jaxmp: a collective takes an array, places to read, and a position, and gives an array");
  }
  JAXMP_ASSIGN_OR_RETURN(const void* given, PositionAt(args, args.size() - 1));
  const int32_t position = *static_cast<const int32_t*>(given);
  const auto operand = args.get<ffi::AnyBuffer>(0);
  auto result = rets.get<ffi::AnyBuffer>(0);
  if (operand.has_error()) return InvalidArgument(operand.error().message());
  if (result.has_error()) return InvalidArgument(result.error().message());
  JAXMP_ASSIGN_OR_RETURN(CollectiveArrays arrays, Decode(call, *operand, **result));
  if (call.picks) {
    JAXMP_ASSIGN_OR_RETURN(const size_t nranks, RanksOf(call, position));
    JAXMP_ASSIGN_OR_RETURN(arrays.picks, ReadPicks(args, 1 + ntokens, nranks, *operand));
    if (site.part == CollectivePart::kWrite) arrays.picks.npicks = 0;
  }
  if (site.part == CollectivePart::kWrite) {
    JAXMP_ASSIGN_OR_RETURN(uint64_t* place, Places(**result, 1));
    JAXMP_ASSIGN_OR_RETURN(place[0], WriteOperand(call, position, arrays));
    place[1] = static_cast<uint32_t>(run.run_id);
  } else if (operand->element_type() != (*result)->element_type()) {
    return InvalidArgument("jaxmp: a collective's operand and result are of one type");
  } else if (is_read) {
    const auto places = args.get<ffi::AnyBuffer>(1);
    if (places.has_error()) return InvalidArgument(places.error().message());
    JAXMP_ASSIGN_OR_RETURN(const size_t nranks, RanksOf(call, position));
    JAXMP_ASSIGN_OR_RETURN(const uint64_t* found, Places(*places, nranks));
    JAXMP_ASSIGN_OR_RETURN(const std::vector<uint64_t> tokens, TokensOf(call, position, run.run_id, found));
    JAXMP_RETURN_IF_ERROR(ReadOperands(call, position, arrays, tokens.data()));
  } else {
    RunCollective(site.call, {&site, run.run_id}, position, arrays, std::move(done));
    return {};
  }
  done({});
  return {};
}

ffi::Future RunCollectiveCall(ProcessCollectiveSite* site, ffi::RunId run, ffi::RemainingArgs args,
                              ffi::RemainingRets rets) {
  return FutureOf(
      [&](std::function<void(const Status&)> done) { return Start(*site, run, args, rets, std::move(done)); });
}

}  // namespace

XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame) {
  return Instantiate<ProcessBarrierSite, MakeBarrierSite>(frame);
}
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame) {
  return Execute<ProcessBarrierSite, RunBarrier, ffi::RunId>(frame);
}

XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  return Instantiate<ProcessCollectiveSite, MakeCollectiveSite>(frame);
}
XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame) {
  return Execute<ProcessCollectiveSite, RunCollectiveCall, ffi::RunId>(frame);
}

}  // namespace jaxmp
