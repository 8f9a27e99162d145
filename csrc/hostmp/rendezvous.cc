#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/hostmp/host.h"
#include "csrc/hostmp/job.h"
#include "csrc/hostmp/text.h"
#include "csrc/hostmp/validate.h"

namespace jaxmp::hostmp {

// One call that some ranks have not reached yet.
struct Gathering {
  explicit Gathering(int nranks) : arrivals(static_cast<size_t>(nranks)) {}

  std::vector<Arrival> arrivals;  // by rank; a null stream has not arrived
  int count = 0;
};

struct Rendezvous::Table {
  std::mutex mutex;
  // In the order in which any rank reached them. A rank joins the first that it has not joined yet, so that its i-th
  // arrival meets everybody's i-th; a full one is always the first. Entries go with their last gathering: nothing
  // grows with the number of runs.
  std::map<std::pair<int64_t, int64_t>, std::deque<Gathering>> open;
};

Rendezvous::Rendezvous() : table_(std::make_unique<Table>()) {}

Rendezvous::~Rendezvous() {
  const Status status = FailedPrecondition("jaxmp: the executable was destroyed while ranks waited for their peers");
  for (const auto& entry : table_->open) {
    for (const Gathering& gathering : entry.second) complete(gathering.arrivals, -1, status);
  }
}

namespace {

// Threads on which peers' programs resume. They may block there for as long as a program blocks, so a thread is added
// whenever none is idle, and kept: in the steady state a call starts no thread.
class Completions {
 public:
  void post(Stream* stream, const Status& status) {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.emplace_back(stream, status);
    if (waiting_.size() <= idle_) {
      lock.unlock();
      wake_.notify_one();
    } else {
      std::thread([this] { serve(); }).detach();
    }
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      const auto [stream, status] = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      stream->done(stream->context, status);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<Stream*, Status>> waiting_;
  size_t idle_ = 0;
};

// Never destroyed: its threads outlive main.
Completions& completions() {
  static auto* const threads = new Completions;
  return *threads;
}

// Joins the call of this rank's turn. Returns all arrivals where this was the last one.
std::vector<Arrival> join(Rendezvous::Table& table, Arrival arrival, int rank, int nranks) {
  const std::pair<int64_t, int64_t> key(arrival.stream->run_id, arrival.stream->group_id);
  std::lock_guard<std::mutex> lock(table.mutex);
  std::deque<Gathering>& open = table.open[key];
  auto gathering = open.begin();
  while (gathering != open.end() && gathering->arrivals[static_cast<size_t>(rank)].stream) ++gathering;
  if (gathering == open.end()) gathering = open.emplace(gathering, nranks);
  gathering->arrivals[static_cast<size_t>(rank)] = std::move(arrival);
  if (++gathering->count < nranks) return {};
  std::vector<Arrival> arrivals = std::move(gathering->arrivals);
  open.erase(gathering);
  if (open.empty()) table.open.erase(key);
  return arrivals;
}

Status first_error(const std::vector<Arrival>& arrivals) {
  for (size_t rank = 0; rank < arrivals.size(); ++rank) {
    const Status& error = arrivals[rank].error;
    if (!error.ok() && arrivals.size() == 1) return error;
    if (!error.ok()) return Status(error.code(), text("rank ", rank, " of ", arrivals.size(), ": ", error.message()));
  }
  if (arrivals.size() == 1) return {};
  std::vector<const Call*> calls;
  for (const Arrival& arrival : arrivals) calls.push_back(arrival.call.get());
  return check_agreement(calls);
}

}  // namespace

void complete(const std::vector<Arrival>& arrivals, int self, const Status& status) {
  for (size_t rank = 0; rank < arrivals.size(); ++rank) {
    Stream* const stream = arrivals[rank].stream;
    if (stream && static_cast<int>(rank) != self) completions().post(stream, status);
  }
  if (self < 0) return;
  Stream* const own = arrivals[static_cast<size_t>(self)].stream;
  own->done(own->context, status);
}

void arrive(Arrival arrival, int rank, int nranks) {
  std::vector<Arrival> arrivals;
  if (nranks == 1) {
    arrivals.push_back(std::move(arrival));
  } else {
    Rendezvous::Table& table = arrival.stream->rendezvous->table();
    arrivals = join(table, std::move(arrival), rank, nranks);
  }
  if (arrivals.empty()) return;
  const Status error = first_error(arrivals);
  error.ok() ? run_product(std::move(arrivals), rank) : complete(arrivals, rank, error);
}

void fail(Stream& stream, int rank, int nranks, Status why) {
  if (why.ok()) why = Internal("jaxmp: a rank gave up without saying why");
  Arrival arrival;
  arrival.stream = &stream;
  arrival.error = std::move(why);
  arrive(std::move(arrival), rank, nranks);
}

}  // namespace jaxmp::hostmp
