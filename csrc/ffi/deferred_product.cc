#include "csrc/ffi/deferred_product.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "csrc/base/completion_pool.h"
#include "csrc/base/float_state.h"
#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/ffi/call_frame.h"
#include "csrc/ffi/host_call.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/plan_cache.h"

namespace ffi = xla::ffi;

namespace jaxmp {
namespace {

StatusOr<std::unique_ptr<DeferredSite>> MakeDeferredSite(const ffi::Dictionary& dictionary) {
  JAXMP_ASSIGN_OR_RETURN(Attributes attributes, ReadAttributes(dictionary));
  const auto kept = attributes.extract("kept");
  if (kept.empty()) return InvalidArgument("jaxmp: attribute kept is missing");
  JAXMP_ASSIGN_OR_RETURN(Problem problem, MakeProblem(attributes));
  JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<Plan> plan, plan_cache().Get(host_api(), problem));
  if (plan->nranks() != 1 || plan->is_empty()) return InvalidArgument("jaxmp: a deferred product has one rank, and d");
  return std::make_unique<DeferredSite>(std::move(plan), kept.mapped() == Attribute(std::string("a")));
}

// ---- products under way

using Bytes = std::shared_ptr<char>;
using Clock = std::chrono::steady_clock;

// Our memory. Blocks that are given back are kept for a while: new pages cost about as much as copying to them.
class Blocks {
 public:
  Bytes Take(int64_t size) {
    constexpr size_t kAlignment = 64;
    const size_t rounded = (static_cast<size_t>(size) / kAlignment + 1) * kAlignment;
    char* memory = TakeFree(rounded);
    if (!memory) memory = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    if (!memory) throw std::bad_alloc();
    return Bytes(memory, [this, rounded](char* block) {
      std::lock_guard<std::mutex> lock(mutex_);
      free_.push_back({rounded, block, Clock::now()});
    });
  }

  size_t Trim(double unused_for) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t kept = 0;
    for (auto it = free_.begin(); it != free_.end();) {
      const bool is_old = std::chrono::duration<double>(Clock::now() - it->since).count() >= unused_for;
      if (is_old) std::free(it->memory);
      kept += is_old ? 0 : it->size;
      it = is_old ? free_.erase(it) : std::next(it);
    }
    return kept;
  }

 private:
  struct Free {
    size_t size;
    char* memory;
    Clock::time_point since;
  };

  // Returns the block of this size that was used last, or null.
  char* TakeFree(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found =
        std::find_if(free_.rbegin(), free_.rend(), [size](const Free& each) { return each.size == size; });
    if (found == free_.rend()) return nullptr;
    char* const memory = found->memory;
    free_.erase(std::next(found).base());
    return memory;
  }

  std::mutex mutex_;
  std::vector<Free> free_;  // in the order of their return
};

Blocks& blocks() {
  static auto* const all = new Blocks;
  return *all;
}

Bytes CopyOf(const void* from, int64_t size) {
  Bytes bytes = blocks().Take(size);
  std::memcpy(bytes.get(), from, static_cast<size_t>(size));
  return bytes;
}

struct Product {
  int64_t run_id;
  int32_t device;
  Bytes kept, d;
  std::shared_future<ffi::Error> done;
};

// Products that were started and are not collected yet, by ticket.
class Tickets {
 public:
  // Drops the products that other runs have left on the device, as a failed run does. If one of these runs still goes
  // on, its collect multiplies again.
  uint64_t Give(std::shared_ptr<const Product> product) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = products_.begin(); it != products_.end();) {
      const bool is_left = it->second->device == product->device && it->second->run_id != product->run_id;
      it = is_left ? products_.erase(it) : std::next(it);
    }
    products_.emplace(++last_, std::move(product));
    return last_;
  }

  std::shared_ptr<const Product> Find(uint64_t ticket, bool takes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = products_.find(ticket);
    if (found == products_.end()) return nullptr;
    std::shared_ptr<const Product> product = found->second;
    if (takes) products_.erase(found);
    return product;
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::shared_ptr<const Product>> products_;
};

Tickets& tickets() {
  static auto* const all = new Tickets;
  return *all;
}

CompletionPool& threads() {
  static auto* const pool = new CompletionPool;
  return *pool;
}

// A chain's products are multiplied in turn, each of them on all of XLA's threads.
uint64_t StartProduct(const DeferredSite& site, int64_t run_id, int32_t device, int num_threads,
                      const std::shared_ptr<const Product>& ahead, const Buffers& operands) {
  const Problem& p = site.plan->problem();
  const Distribution& layout = site.plan->distribution();
  const int64_t a_size = BytesOf(p.dtype_a, layout.a.local_size()), b_size = BytesOf(p.dtype_b, layout.b.local_size());
  auto product = std::make_shared<Product>();
  product->run_id = run_id, product->device = device;
  product->d = blocks().Take(BytesOf(p.dtype_d, layout.d.local_size()));
  product->kept = ahead ? ahead->kept : site.keeps_a ? CopyOf(operands.a, a_size) : CopyOf(operands.b, b_size);
  Bytes piece = site.keeps_a ? CopyOf(operands.b, b_size) : CopyOf(operands.a, a_size);
  auto work = std::make_shared<std::packaged_task<ffi::Error()>>(
      [plan = site.plan, keeps_a = site.keeps_a, kept = product->kept, d = product->d, piece = std::move(piece),
       after = ahead ? ahead->done : std::shared_future<ffi::Error>(), state = FloatState::Current(), num_threads] {
        if (after.valid()) after.wait();
        const ScopedFloatState scope(state);
        Buffers buffers;
        buffers.a = (keeps_a ? kept : piece).get(), buffers.b = (keeps_a ? piece : kept).get(), buffers.d = d.get();
        hostmp::Rendezvous rendezvous;
        return RunProduct(plan, buffers, rendezvous, 0, num_threads, GroupRank{0, 0}).error;
      });
  product->done = work->get_future();
  threads().Post([work = std::move(work)]() mutable {
    (*work)();
    work.reset();  // frees the operands
  });
  return tickets().Give(std::move(product));
}

// ---- execute

template <typename T>
StatusOr<T*> One(const ffi::ErrorOr<ffi::AnyBuffer>& buffer, ffi::DataType type, const char* name) {
  if (buffer.has_error()) return InvalidArgument(buffer.error().message());
  if (buffer->element_type() == type && buffer->element_count() == 1) return static_cast<T*>(buffer->untyped_data());
  return InvalidArgument("jaxmp: ", name, " of a deferred product must be one number of its type");
}

Status Start(const DeferredSite& site, int64_t run_id, int32_t device, int num_threads, const ffi::RemainingArgs& args,
             ffi::RemainingRets& rets) {
  if (args.size() != 4 || rets.size() != 2) return InvalidArgument("jaxmp: start takes 4 arguments and 2 results");
  Buffers operands;
  JAXMP_RETURN_IF_ERROR(
      ReadFactors(site.plan->problem(), site.plan->distribution(), args, rets, /*has_d=*/false, &operands));
  JAXMP_ASSIGN_OR_RETURN(const uint64_t* ahead, One<uint64_t>(args.get<ffi::AnyBuffer>(2), ffi::U64, "ticket"));
  JAXMP_ASSIGN_OR_RETURN(const int32_t* next, One<int32_t>(args.get<ffi::AnyBuffer>(3), ffi::S32, "next"));
  auto of_ticket = rets.get<ffi::AnyBuffer>(0), of_next = rets.get<ffi::AnyBuffer>(1);
  if (of_ticket.has_error() || of_next.has_error()) return Internal("jaxmp: results of start");
  JAXMP_ASSIGN_OR_RETURN(uint64_t* ticket, One<uint64_t>(**of_ticket, ffi::U64, "ticket"));
  JAXMP_ASSIGN_OR_RETURN(int32_t* copied, One<int32_t>(**of_next, ffi::S32, "next"));
  *copied = *next;
  try {
    *ticket = StartProduct(site, run_id, device, num_threads, tickets().Find(*ahead, /*takes=*/false), operands);
  } catch (const std::exception&) {  // no memory or no thread: collect multiplies
    *ticket = 0;
  }
  return {};
}

ffi::Error RunStart(DeferredSite* site, ffi::RunId run, int32_t device, ffi::ThreadPool pool, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  return ToError(Start(*site, run.run_id, device, static_cast<int>(pool.num_threads()), args, rets));
}

StatusOr<uint64_t> ReadCollect(const DeferredSite& site, const ffi::RemainingArgs& args, ffi::RemainingRets& rets,
                               Buffers* buffers) {
  if (args.size() != 4 || rets.size() != 1) return InvalidArgument("jaxmp: collect takes 4 arguments and 1 result");
  JAXMP_RETURN_IF_ERROR(
      ReadFactors(site.plan->problem(), site.plan->distribution(), args, rets, /*has_d=*/true, buffers));
  JAXMP_ASSIGN_OR_RETURN(const uint64_t* ticket, One<uint64_t>(args.get<ffi::AnyBuffer>(2), ffi::U64, "ticket"));
  return *ticket;
}

ffi::Error RunCollect(DeferredSite* site, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Buffers buffers;
  const StatusOr<uint64_t> ticket = ReadCollect(*site, args, rets, &buffers);
  if (!ticket.ok()) return ToError(ticket.status());
  const std::shared_ptr<const Product> product = tickets().Find(*ticket, /*takes=*/true);
  if (!product) {
    hostmp::Rendezvous rendezvous;
    const int num_threads = static_cast<int>(pool.num_threads());
    return RunProduct(site->plan, buffers, rendezvous, 0, num_threads, GroupRank{0, 0}).error;
  }
  const ffi::Error& error = product->done.get();
  const Problem& p = site->plan->problem();
  const int64_t size = BytesOf(p.dtype_d, site->plan->distribution().d.local_size());
  if (error.success()) std::memcpy(buffers.d, product->d.get(), static_cast<size_t>(size));
  return error;
}

}  // namespace

size_t TrimProducts(double unused_for) { return blocks().Trim(unused_for); }

XLA_FFI_Error* DeferredInstantiate(XLA_FFI_CallFrame* frame) {
  return Instantiate<DeferredSite, MakeDeferredSite>(frame);
}
XLA_FFI_Error* StartExecute(XLA_FFI_CallFrame* frame) {
  return Execute<DeferredSite, RunStart, ffi::RunId, ffi::DeviceOrdinal, ffi::ThreadPool>(frame);
}
XLA_FFI_Error* CollectExecute(XLA_FFI_CallFrame* frame) {
  return Execute<DeferredSite, RunCollect, ffi::ThreadPool>(frame);
}

}  // namespace jaxmp
