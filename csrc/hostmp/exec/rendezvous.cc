#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/base/float_state.h"
#include "csrc/base/str_cat.h"
#include "csrc/hostmp/handles/runtime.h"
#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/validate/agreement.h"

namespace jaxmp::hostmp {

struct Rendezvous::Table {
  std::mutex mutex;
  // In the order in which any rank reached them. A rank joins the first that it has not joined yet, so that its i-th
  // arrival meets everybody's i-th; a full one is always the first. Entries go with their last gathering: nothing
  // grows with the number of runs.
  std::map<std::pair<int64_t, int64_t>, std::deque<std::shared_ptr<Meeting>>> open;
};

Rendezvous::Rendezvous() : table_(std::make_unique<Table>()) {}

Rendezvous::~Rendezvous() {
  const Status status = FailedPrecondition("jaxmp: the executable was destroyed while ranks waited for their peers");
  for (const auto& entry : table_->open) {
    for (const std::shared_ptr<Meeting>& meeting : entry.second) complete(*meeting, status);
  }
}

namespace {

// Threads on which peers' programs resume, each in the state of the thread that it came on. They may block there for as
// long as a program blocks, so a thread is added whenever none is idle, and kept: in the steady state a call starts no
// thread.
class Completions {
 public:
  void post(const Arrival& arrival, const Status& status) {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.push_back({arrival.stream, arrival.state, status});
    if (waiting_.size() <= idle_) {
      lock.unlock();
      wake_.notify_one();
    } else {
      std::thread([this] { serve(); }).detach();
    }
  }

 private:
  struct Completion {
    Stream* stream;
    FloatState state;
    Status status;
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      const Completion next = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      {
        const ScopedFloatState state(next.state);
        next.stream->done(next.stream->context, next.status);
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Completion> waiting_;
  size_t idle_ = 0;
};

// Never destroyed: its threads outlive main.
Completions& completions() {
  static auto* const threads = new Completions;
  return *threads;
}

// Joins the call of this rank's turn.
std::shared_ptr<Meeting> join(Rendezvous::Table& table, Arrival arrival, int rank, int nranks, bool* is_full) {
  const std::pair<int64_t, int64_t> key(arrival.stream->run_id, arrival.stream->group_id);
  std::lock_guard<std::mutex> lock(table.mutex);
  std::deque<std::shared_ptr<Meeting>>& open = table.open[key];
  auto found = open.begin();
  while (found != open.end() && (*found)->arrivals[static_cast<size_t>(rank)].stream) ++found;
  if (found == open.end()) found = open.emplace(found, std::make_shared<Meeting>(nranks));
  const std::shared_ptr<Meeting> meeting = *found;
  meeting->arrivals[static_cast<size_t>(rank)] = std::move(arrival);
  *is_full = ++meeting->count == nranks;
  if (*is_full) {
    open.erase(found);
    if (open.empty()) table.open.erase(key);
  }
  return meeting;
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

// How long a thread stays for the others to come, and for the last tile: about what it costs to wake another thread
// instead, twice. It must end: a program may need this thread to bring the very rank that is missing.
constexpr std::chrono::microseconds kPatience(100);

template <typename Condition>
bool wait_for(const Condition& holds) {
  if (holds()) return true;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  do {
    std::this_thread::yield();  // there may be more ranks than processors
    if (holds()) return true;
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// A rank's thread at the meeting: it helps with the tiles where they come soon, and completes its own stream where it
// is still here at the end.
void attend(Meeting& meeting, int rank, bool has_worked) {
  std::atomic<Seat>& seat = meeting.seats[static_cast<size_t>(rank)];
  const auto is_done = [&seat] { return seat.load(std::memory_order_acquire) == Seat::kDone; };
  const auto is_open = [&] { return meeting.is_open.load(std::memory_order_acquire); };
  if (!has_worked && wait_for([&] { return is_open() || is_done(); }) && !is_done()) work(meeting);
  if (has_worked || is_open()) wait_for(is_done);
  if (seat.exchange(Seat::kGone, std::memory_order_acq_rel) != Seat::kDone) return;  // complete() will see to it
  Stream* const stream = meeting.arrivals[static_cast<size_t>(rank)].stream;
  stream->done(stream->context, meeting.status);
}

}  // namespace

void complete(Meeting& meeting, const Status& status) {
  meeting.status = status;
  for (size_t rank = 0; rank < meeting.arrivals.size(); ++rank) {
    const Arrival& arrival = meeting.arrivals[rank];
    const Seat seat = meeting.seats[rank].exchange(Seat::kDone, std::memory_order_acq_rel);
    if (arrival.stream && seat == Seat::kGone) completions().post(arrival, status);
  }
}

void arrive(Arrival arrival, int rank, int nranks) {
  bool is_full = nranks == 1;
  std::shared_ptr<Meeting> meeting;
  if (is_full) {
    meeting = std::make_shared<Meeting>(1);
    meeting->arrivals[0] = std::move(arrival);
  } else {
    Rendezvous::Table& table = arrival.stream->rendezvous->table();
    meeting = join(table, std::move(arrival), rank, nranks, &is_full);
  }
  if (is_full) {
    const Status error = first_error(meeting->arrivals);
    error.ok() ? run_product(meeting, rank) : complete(*meeting, error);
  }
  attend(*meeting, rank, is_full);
}

void fail(Stream& stream, int rank, int nranks, Status why) {
  if (why.ok()) why = Internal("jaxmp: a rank gave up without saying why");
  Arrival arrival;
  arrival.stream = &stream;
  arrival.error = std::move(why);
  arrive(std::move(arrival), rank, nranks);
}

}  // namespace jaxmp::hostmp
