#include "csrc/cuda/nccl_id_exchange.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "csrc/cuda/libraries.h"

namespace jaxmp::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kFirst = 4;             // a first run's deadline, as a multiple of a call's
constexpr char kId = 'i', kError = 'e';  // the first character of a published value; an id or an error follows

// Entries stay: there is one for each communicator, and communicators stay as well.
class Table {
 public:
  StatusOr<std::string> operator()(const std::string& key, const std::string* value, double timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (value) {
      values_[key] = *value;
      changed_.notify_all();
      return *value;
    }
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
    if (changed_.wait_until(lock, deadline, [&] { return values_.count(key) > 0; })) return values_[key];
    return FailedPrecondition("no thread of this process published it");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// Never destroyed, because the Python function must not be released after the interpreter, and threads may still wait.
struct ExchangeState {
  std::mutex mutex;
  std::shared_ptr<const Exchange> exchange;  // guarded by mutex; null: the table
  std::atomic<double> timeout{25.0};
  Table table;
};

ExchangeState& exchange_state() {
  static auto* const only = new ExchangeState;
  return *only;
}

std::string KeyOf(const std::string& key, int rank) { return key + "/" + std::to_string(rank); }

std::string Text(double seconds) {
  std::ostringstream text;
  text << seconds;
  return text.str();
}

// Waits on rank 0 until every other rank has come; the id is made after that.
Status AwaitOthers(const std::string& key, int nranks) {
  const double timeout = FirstTimeout();
  const auto start = Clock::now();
  for (int rank = 1; rank < nranks; ++rank) {
    const std::chrono::duration<double> spent = Clock::now() - start;
    const StatusOr<std::string> came = CallExchange(KeyOf(key, rank), nullptr, std::max(0.0, timeout - spent.count()));
    if (came.ok()) continue;
    return FailedPrecondition("jaxmp: rank ", rank, " of ", nranks, " did not come to its first call within ",
                              Text(timeout), " s (", came.status().message(), "); set JAXMP_TIMEOUT to wait longer");
  }
  return {};
}

StatusOr<std::string> MakeValue(const std::string& key, int nranks) {
  JAXMP_RETURN_IF_ERROR(AwaitOthers(key, nranks));
  abi::ncclUniqueId id;
  JAXMP_RETURN_IF_ERROR(Check(Loaded()->nccl.GetUniqueId(&id), "ncclGetUniqueId"));
  return kId + std::string(id.internal, sizeof(id.internal));
}

StatusOr<std::string> ReceiveValue(const std::string& key, int rank, int nranks) {
  const std::string here = "here";
  JAXMP_RETURN_IF_ERROR(CallExchange(KeyOf(key, rank), &here, Timeout()).status());
  // Rank 0 may come last, and then waits for the others under its call mutex.
  StatusOr<std::string> value = CallExchange(key, nullptr, 2 * FirstTimeout());
  if (value.ok()) return value;
  return FailedPrecondition("jaxmp: rank 0 of ", nranks, " did not open their communicator within ",
                            Text(2 * FirstTimeout()), " s (", value.status().message(),
                            "); set JAXMP_TIMEOUT to wait longer");
}

}  // namespace

void SetExchange(Exchange exchange) {
  auto shared = exchange ? std::make_shared<const Exchange>(std::move(exchange)) : nullptr;
  std::lock_guard<std::mutex> lock(exchange_state().mutex);
  exchange_state().exchange.swap(shared);
}

StatusOr<std::string> CallExchange(const std::string& key, const std::string* value, double timeout) {
  std::shared_ptr<const Exchange> exchange;
  {
    std::lock_guard<std::mutex> lock(exchange_state().mutex);
    exchange = exchange_state().exchange;
  }
  return exchange ? (*exchange)(key, value, timeout) : exchange_state().table(key, value, timeout);
}

void SetTimeout(double seconds) { exchange_state().timeout = seconds; }
double Timeout() { return exchange_state().timeout; }
double FirstTimeout() { return kFirst * exchange_state().timeout; }

StatusOr<abi::ncclUniqueId> AgreeOnId(const std::string& key, int rank, int nranks) {
  StatusOr<std::string> value = rank == 0 ? MakeValue(key, nranks) : ReceiveValue(key, rank, nranks);
  if (rank == 0 && nranks > 1) {
    const std::string published = value.ok() ? *value : kError + value.status().message();
    JAXMP_RETURN_IF_ERROR(CallExchange(key, &published, Timeout()).status());
  }
  JAXMP_RETURN_IF_ERROR(value.status());
  if (value->empty() || value->front() == kError) return FailedPrecondition(value->substr(value->empty() ? 0 : 1));
  abi::ncclUniqueId id;
  if (value->size() != sizeof(id.internal) + 1) {
    return Internal("jaxmp: the NCCL id of ", key, " has ", value->size() - 1, " bytes, not 128");
  }
  std::memcpy(id.internal, value->data() + 1, sizeof(id.internal));
  return id;
}

}  // namespace jaxmp::cuda
