#include "tests/cpp/simulation/job.h"

#include <algorithm>
#include <cstdio>
#include <optional>

namespace jaxmp::simulation {
namespace {

using barrier::Arrival;
using barrier::Clock;
using barrier::Kind;
using barrier::Message;
using barrier::Service;

Time virtual_now = 0;
Clock::time_point VirtualNow() { return Clock::time_point(std::chrono::nanoseconds(virtual_now)); }

// As in jaxmp/_src/jobs/watch.py.
constexpr Time kPeriod = kSecond / 4, kSettles = kSecond * 3 / 2;
const char kSilent[] = "does not answer: it is stopped, or its machine or network is gone";

uint64_t TokenOf(int64_t device, int step, size_t call) {
  return static_cast<uint64_t>(device) * 1'000'000 + static_cast<uint64_t>(step) * 1000 + call;
}

}  // namespace

// One device's part of the program.
struct Job::Strand {
  Node* node;
  int64_t device;
  int step = 0;
  size_t next = 0;     // of the calls in `order`
  size_t pending = 0;  // calls
  std::vector<size_t> order;
  bool is_waiting = false, is_over = false;
};

class Job::Node final : public barrier::Transport {
 public:
  Node(Job* job, int process)
      : service({process, job->schedule.nprocesses, double(job->schedule.timeout) / kSecond}, this),
        job_(*job),
        process_(process) {
    for (int i = 0; i < job->schedule.ndevices; ++i) {
      strands.push_back({this, process * job->schedule.ndevices + i, 0, 0, 0, {}, false, false});
    }
  }

  void Want(int process) override;
  void Send(int process, const Message& message) override;
  void Wake() override {
    Post([] {}, 0);
  }

  void Join();
  void Start();
  // Its thread does `work`, which takes `processor`.
  void Post(std::function<void()> work, Time processor);
  // At `time`, or once it is no longer stopped.
  void Later(Time time, std::function<void()> work);
  void Advance(Strand* strand);
  void CollectiveFails(Strand* strand, Time since);
  void Resume() {
    rank().is_stopped = false;
    Wake();
  }
  void Exit();
  void Strike(const Event& event, Strand* strand);

  Service service;
  std::vector<Strand> strands;
  std::map<int, Time> links;  // by process: when the last message to it comes

 private:
  struct Outcome {
    bool is_known = false, is_late = false;  // it comes after the device has gone on
  };
  Rank& rank() { return job_.ranks[size_t(process_)]; }
  void Turn();
  void Compile();
  void Settle();
  void Come(Strand* strand);
  void Enter(Strand* strand, size_t call);
  void Hold(Strand* strand, size_t call, const Arrival& arrival, Time since, std::shared_ptr<Outcome> outcome);
  void Collect(Strand* strand, size_t call);
  void GoOn(Strand* strand);
  void Fail(Strand* strand, const std::string& message);
  void End(const std::string& reason);
  void Guard();
  void Finish();
  void CloseTransport();
  std::string Trouble(Time silent, Time gone, Time waited);

  Job& job_;
  int process_;
  std::deque<std::pair<Time, std::function<void()>>> inbox_;
  std::set<std::pair<int, const Event*>> struck_;
  Event::Kind differs_ = Event::kSlow;  // kShape, kProgram or kRename if it does
  bool has_turn_ = false, has_tick_ = false;
  Time busy_ = 0, moved_ = 0, failed_ = 0;
};

// ---- threads and connections

void Job::Node::Post(std::function<void()> work, Time processor) {
  if (rank().has_ended) return;
  inbox_.emplace_back(processor, std::move(work));
  if (has_turn_ || rank().is_stopped) return;
  has_turn_ = true;
  job_.At(std::max(job_.now, busy_), [this] { Turn(); });
}

void Job::Node::Turn() {
  has_turn_ = false;
  if (rank().has_ended || rank().is_stopped) return;
  busy_ = std::max(busy_, job_.now);
  for (size_t n = inbox_.size(); n > 0 && !rank().has_ended; --n) {
    auto [processor, work] = std::move(inbox_.front());
    inbox_.pop_front();
    busy_ += processor;
    work();
  }
  Settle();
  if (!inbox_.empty()) Wake();
}

void Job::Node::Settle() {
  if (rank().has_ended) return;
  for (barrier::Resumed& each : service.Settle()) {
    Later(job_.now, [each = std::move(each)] { each.done(each.status, each.tokens); });
  }
  if (has_tick_ || !service.NeedsTick()) return;
  has_tick_ = true;
  job_.At(job_.now + Time(std::chrono::nanoseconds(barrier::kTick).count()), [this] {
    has_tick_ = false;
    Wake();
  });
}

void Job::Node::Later(Time time, std::function<void()> work) {
  job_.At(time, [this, work = std::move(work)] {
    if (rank().has_ended) return;
    if (rank().is_stopped) {
      inbox_.emplace_back(0, work);
    } else {
      work();
    }
  });
}

void Job::Node::Want(int process) {
  const Time trip = job_.Latency(process_, process);
  job_.At(job_.now + trip, [this, process, trip] {
    Node& peer = *job_.nodes_[size_t(process)];
    if (job_.IsCut(process_, process)) return;
    if (job_.ranks[size_t(process)].has_ended) {
      Post([this, process] { service.Lose(process, "has ended: nothing listens any more"); }, 0);
      return;
    }
    peer.Post(
        [this, &peer, process, trip] {
          if (links.count(process) || !peer.service.CanConnect(process_)) return;
          if (rank().has_ended) return;
          links[process] = job_.now;
          peer.links[process_] = job_.now + trip;
          ++rank().nsockets;
          ++job_.ranks[size_t(process)].nsockets;
          peer.service.Connect(process_);
          job_.At(job_.now + trip, [this, process] { Post([this, process] { service.Connect(process); }, 0); });
        },
        0);
  });
}

void Job::Node::Send(int process, const Message& message) {
  if (rank().has_ended) return;
  busy_ = std::max(busy_, job_.now) + job_.schedule.processor;
  if (message.kind != Kind::kPing && message.kind != Kind::kPong) {
    ++rank().nmessages;
    rank().nbytes += int64_t(Encode(message).size());
  }
  Time& last = links.at(process);
  last = std::max(last + 1, busy_ + job_.Latency(process_, process));
  job_.At(last, [this, process, message] {
    if (job_.IsCut(process_, process)) return;
    Node& peer = *job_.nodes_[size_t(process)];
    peer.Post([this, &peer, message] { peer.service.Hear(process_, message); }, job_.schedule.processor);
  });
}

void Job::Node::Exit() {
  if (rank().has_ended) return;
  rank().has_ended = true;
  rank().at = job_.now;
  job_.Log(process_, "has ended");
  for (const auto& [process, last] : links) {
    job_.At(std::max(last + 1, job_.now + job_.Latency(process_, process)), [this, process = process] {
      if (job_.IsCut(process_, process)) return;
      Node& peer = *job_.nodes_[size_t(process)];
      peer.Post([this, &peer] { peer.service.Close(process_); }, 0);
    });
  }
  CloseTransport();
}

// The collectives that wait for this process end.
void Job::Node::CloseTransport() {
  for (auto& [place, collective] : job_.collectives_) {
    const auto& [call, step, group] = place;
    const std::vector<int64_t> groups = job_.GroupsOf(job_.schedule.calls[call]);
    const auto is_awaited = [&, group = group](const Strand& strand) {
      return groups[size_t(strand.device)] == group && !collective.joined.count(strand.device);
    };
    if (std::none_of(strands.begin(), strands.end(), is_awaited)) continue;
    for (Strand* each : collective.waiting) {
      if (job_.IsCut(process_, each->node->process_)) continue;
      each->node->Later(job_.now + kMilli, [each, since = job_.now] { each->node->CollectiveFails(each, since); });
    }
  }
}

// ---- the program

// As distributed._join.
void Job::Node::Join() {
  for (int peer = 1; peer < job_.schedule.nprocesses; peer *= 2) {
    service.Want((process_ + peer) % job_.schedule.nprocesses);
  }
}

void Job::Node::Start() {
  for (const Event& event : job_.schedule.events) {
    if (event.rank == process_ && event.kind == Event::kRename) differs_ = event.kind;
  }
  Compile();
  for (Strand& strand : strands) Advance(&strand);
  Later(job_.now + kPeriod, [this] { Guard(); });
}

void Job::Node::Compile() {
  for (size_t call = 0; call < job_.schedule.calls.size(); ++call) service.Expect(*job_.SignatureOf(call, differs_));
}

void Job::Node::Advance(Strand* strand) {
  const Schedule& schedule = job_.schedule;
  if (strand->is_over) return;
  if (strand->next == schedule.calls.size()) {
    if (strand->pending > 0) return;
    ++strand->step, strand->next = 0;
  }
  if (strand->step >= schedule.nsteps) {
    strand->is_over = true;
    Finish();
    return;
  }
  if (strand->next == 0) {
    strand->order.resize(schedule.calls.size());
    for (size_t i = 0; i < strand->order.size(); ++i) {
      strand->order[i] = i;
      if (schedule.is_concurrent) std::swap(strand->order[i], strand->order[job_.Draw() % (i + 1)]);
    }
  }
  Time pause = schedule.pause ? Time(job_.Draw()) % schedule.pause : 0;
  for (const Event& event : schedule.events) {
    const bool is_here = event.rank == process_ && event.step == strand->step && event.call == int(strand->next);
    if (is_here && event.kind == Event::kSlow) pause += event.lasts;
  }
  strand->is_waiting = false;
  Later(job_.now + pause, [this, strand] { Come(strand); });
}

void Job::Node::Come(Strand* strand) {
  if (strand->is_over) return;
  const int step = strand->step;
  for (const Event& event : job_.schedule.events) {
    if (event.rank != process_ || event.step != step || event.call != int(strand->next)) continue;
    const bool is_own = event.kind == Event::kAbandon;  // of each device
    if (!struck_.insert({is_own ? int(strand->device) : -1, &event}).second) continue;
    if (event.after == 0) {
      Strike(event, strand);
    } else {
      Later(job_.now + event.after, [this, &event, strand] { Strike(event, strand); });
    }
    if (rank().has_ended || strand->step != step || strand->is_over) return;
    if (rank().is_stopped) {
      inbox_.emplace_back(0, [this, strand] { Come(strand); });
      return;
    }
  }
  const size_t call = strand->order[strand->next];
  if (!job_.schedule.is_concurrent) {
    Enter(strand, call);
    return;
  }
  ++strand->next;
  Enter(strand, call);
  if (strand->step == step && strand->next < job_.schedule.calls.size()) Advance(strand);
}

void Job::Node::Enter(Strand* strand, size_t call) {
  const bool has_tokens = job_.schedule.calls[call].has_tokens;
  const auto signature = job_.SignatureOf(call, differs_);
  const int64_t run = (differs_ == Event::kRename ? 5'000'000 : differs_ == Event::kProgram ? 9'000'000 : 1000);
  strand->is_waiting = true;
  ++strand->pending;
  const int step = strand->step;
  rank().came = moved_ = job_.now;
  ++rank().entered[signature->call];
  job_.Log(process_, "comes to " + signature->call + " in step " + std::to_string(step));
  const auto outcome = std::make_shared<Outcome>();
  const auto done = [=](const Status& status, const std::vector<uint64_t>& tokens) {
    outcome->is_known = true;
    if (rank().has_ended) return;
    if (!has_tokens) {
      if (outcome->is_late) {
        if (!status.ok()) service.FailLate(status);
      } else if (status.ok()) {
        Collect(strand, call);
      } else {
        Fail(strand, status.message());
      }
      return;
    }
    if (strand->step != step) return;  // it has given this run up
    if (!status.ok()) {
      Fail(strand, status.message());
      return;
    }
    const auto group = size_t(signature->groups[size_t(strand->device)]);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] == TokenOf(signature->members[group].positions[i], step, call)) continue;
      job_.wrong.push_back("rank " + std::to_string(process_) + " got tokens of another call");
    }
    GoOn(strand);
  };
  Service::Entered entered = service.Enter(signature, {signature.get(), run + step}, strand->device,
                                           TokenOf(strand->device, step, call), done);
  if (entered.outcome) {
    done(*entered.outcome, entered.tokens);
  } else if (!has_tokens) {
    Hold(strand, call, *entered.arrival, job_.now, outcome);
  }
}

// As ArriveForAMoment.
void Job::Node::Hold(Strand* strand, size_t call, const Arrival& arrival, Time since,
                     std::shared_ptr<Outcome> outcome) {
  Later(job_.now + std::chrono::nanoseconds(barrier::kMoment).count(), [=] {
    if (outcome->is_known) return;
    if (service.IsHeld(arrival, std::chrono::nanoseconds(job_.now - since))) {
      Hold(strand, call, arrival, since, outcome);
      return;
    }
    outcome->is_late = true;
    Collect(strand, call);
  });
}

// A collective of XLA's: done once all devices of the group have joined. It tells no runs apart, but the steps here.
void Job::Node::Collect(Strand* strand, size_t call) {
  const std::vector<int64_t> groups = job_.GroupsOf(job_.schedule.calls[call]);
  const int64_t group = groups[size_t(strand->device)];
  Collective& collective = job_.collectives_[{call, strand->step, group}];
  collective.joined.insert(strand->device);
  collective.waiting.push_back(strand);
  for (size_t device = 0; device < groups.size(); ++device) {
    const size_t process = device / size_t(job_.schedule.ndevices);
    const Rank& other = job_.ranks[process];
    const bool has_left = other.has_ended || other.has_finished;
    if (groups[device] != group || !has_left || collective.joined.count(int64_t(device))) continue;
    if (job_.IsCut(process_, int(process))) continue;
    Later(job_.now + kMilli, [this, strand, since = job_.now] { CollectiveFails(strand, since); });
    return;
  }
  if (int64_t(collective.joined.size()) < std::count(groups.begin(), groups.end(), group)) return;
  for (Strand* each : std::exchange(collective.waiting, {})) {
    each->node->Later(job_.now + 100 * kMicro, [each] { each->node->GoOn(each); });
  }
}

// As jaxmp.distributed.cause.
void Job::Node::CollectiveFails(Strand* strand, Time since) {
  if (!strand->is_waiting || !rank().saw.empty()) return;
  std::string why = service.failure(), first;
  for (const PeerState& peer : service.States()) {
    if (!service.failure().empty() || peer.gone.empty()) continue;
    const std::string who = "rank " + std::to_string(peer.process) + " " + peer.gone;
    if (first.empty()) first = who;
    if (who.find(": rank ") == std::string::npos) why += (why.empty() ? "" : ", ") + who;
  }
  if (why.empty()) why = first;
  if (why.empty() && job_.now - since < kSecond) {
    Later(job_.now + kSecond / 20, [this, strand, since] { CollectiveFails(strand, since); });
    return;
  }
  End(why.empty() ? "the transport gave up, though every process answers" : why);
}

void Job::Node::GoOn(Strand* strand) {
  moved_ = job_.now;
  --strand->pending;
  if (!job_.schedule.is_concurrent) ++strand->next;
  if (strand->next == job_.schedule.calls.size() || !job_.schedule.is_concurrent) Advance(strand);
}

void Job::Node::Fail(Strand* strand, const std::string& message) {
  job_.Log(process_, "fails: " + message);
  const std::string text = message.substr(message.find(": ") + 2);
  if (!service.failure().empty() || message.find("has come to run") == std::string::npos) {
    End(text);
    return;
  }
  ++rank().nerrors;  // which its program catches
  strand->pending = 0, strand->next = 0;
  ++strand->step;
  Advance(strand);
}

void Job::Node::Strike(const Event& event, Strand* strand) {
  if (rank().has_ended) return;
  job_.Log(process_, event.Text());
  if (event.IsFault() && job_.fault_at < 0) job_.fault_at = job_.now;
  switch (event.kind) {
    case Event::kKill:
      rank().is_killed = true;
      Exit();
      return;
    case Event::kStop:
    case Event::kPause:
      rank().is_stopped = true;
      if (event.kind == Event::kPause) job_.At(job_.now + event.lasts, [this] { Resume(); });
      return;
    case Event::kRaise:
      End("it raised ValueError: bad luck");
      return;
    case Event::kLeave:
      for (Strand& each : strands) each.is_over = true;
      Finish();
      return;
    case Event::kCut:
      job_.is_cut_ = true;
      for (int i = event.rank; i < event.rank + event.machine; ++i) job_.is_apart_[size_t(i)] = true;
      return;
    case Event::kShape:
    case Event::kProgram:
      differs_ = event.kind;
      Compile();
      return;
    case Event::kAbandon:
      ++strand->step, strand->next = 0;
      Advance(strand);
      return;
    default:
      return;
  }
}

// ---- the end

void Job::Node::End(const std::string& reason) {
  if (rank().has_ended || !rank().saw.empty()) return;
  job_.Log(process_, "sees: " + reason);
  rank().saw = reason;
  service.Leave(reason.substr(0, 500));
  Later(job_.now + kMilli, [this] { Exit(); });
}

// As distributed._farewell.
void Job::Node::Finish() {
  if (!rank().saw.empty() || rank().has_finished) return;
  if (std::any_of(strands.begin(), strands.end(), [](const Strand& strand) { return !strand.is_over; })) return;
  if (!service.failure().empty()) {
    End(service.failure());
    return;
  }
  rank().has_finished = true;
  service.Leave("");
  CloseTransport();
  if (++job_.nleft_ < job_.schedule.nprocesses) return;
  for (const auto& node : job_.nodes_) node->Later(job_.now + kMilli, [&node] { node->Exit(); });
}

// Returns the first peer that is silent for longer than `silent`, or has been gone for `gone`, if this process has
// waited for as long.
std::string Job::Node::Trouble(Time silent, Time gone, Time waited) {
  std::string found;
  for (const PeerState& peer : service.States()) {
    const bool is_silent = peer.gone.empty();
    if (!is_silent && peer.is_clean) continue;
    const auto seconds = Time((is_silent ? peer.silence : peer.gone_for) * kSecond);
    if (!found.empty() || std::min(seconds, waited) < (is_silent ? silent : gone)) continue;
    found = "rank " + std::to_string(peer.process) + " " + (is_silent ? kSilent : peer.gone);
  }
  return found;
}

// As watch.guard_main_thread, and the waiting of distributed._farewell.
void Job::Node::Guard() {
  if (!rank().saw.empty()) return;
  if (rank().has_finished) {
    const std::string trouble = Trouble(job_.schedule.timeout + 1, 0, kSecond * 1000);
    if (!trouble.empty()) End(trouble);
  } else {
    const Time limit = job_.schedule.timeout + kSettles;
    const bool waits = std::any_of(strands.begin(), strands.end(), [](const Strand& each) { return each.is_waiting; });
    const Time waited = waits ? job_.now - moved_ : 0;
    std::string reason = Trouble(limit, limit, waited);
    if (!service.failure().empty()) {
      failed_ = failed_ ? failed_ : job_.now;
      const Time settles = service.has_failed_late() ? kSettles : limit;
      if (std::min(job_.now - failed_, waited) > settles) reason = service.failure();
    }
    if (!reason.empty()) End(reason);
  }
  Later(job_.now + kPeriod, [this] { Guard(); });
}

// ---- the job

Job::Job(const Schedule& schedule, bool is_logged)
    : schedule(schedule), ranks(size_t(schedule.nprocesses)), random_(schedule.seed * 2 + 1), is_logged_(is_logged) {
  virtual_now = 0;
  Clock::source = &VirtualNow;
  is_apart_.resize(ranks.size());
  for (int i = 0; i < schedule.nprocesses; ++i) nodes_.push_back(std::make_unique<Node>(this, i));
}

Job::~Job() { Clock::source = &std::chrono::steady_clock::now; }

void Job::Run(Time limit) {
  for (const auto& node : nodes_) {
    node->Join();
    At(kSecond, [&node] { node->Start(); });
  }
  while (!timed_.empty() && timed_.top().time <= limit) {
    now = virtual_now = timed_.top().time;
    const std::function<void()> run = timed_.top().run;
    timed_.pop();
    run();
  }
}

Time Job::Latency(int from, int to) {
  Time most = schedule.most;
  for (const Event& event : schedule.events) {
    if (event.kind == Event::kSlowLink && (event.rank == from || event.rank == to)) most = std::max(most, event.lasts);
  }
  return schedule.least + (most > schedule.least ? Time(Draw()) % (most - schedule.least) : 0);
}

void Job::Log(int rank, const std::string& what) {
  if (is_logged_) std::printf("%10.6f rank %d %s\n", double(now) / kSecond, rank, what.c_str());
}

std::vector<int64_t> Job::GroupsOf(const Call& call) const {
  std::vector<int64_t> groups;
  for (int process = 0; process < schedule.nprocesses; ++process) {
    const int row = process / schedule.ncolumns, column = process % schedule.ncolumns;
    groups.insert(groups.end(), size_t(schedule.ndevices),
                  call.group == Call::kAll    ? 0
                  : call.group == Call::kRows ? row
                                              : column);
  }
  return groups;
}

std::shared_ptr<const CallSignature> Job::SignatureOf(size_t call, Event::Kind kind) {
  auto& known = signatures_[{call, kind}];
  if (known) return known;
  CallSignature signature;
  const bool is_other = kind == Event::kProgram;
  signature.program = is_other ? "jit_g" : kind == Event::kRename ? "jit_wrapper" : "jit_f";
  signature.index = int64_t(call) + (is_other ? 7 : 0);
  signature.call = "matmul at train.py:" + std::to_string(41 + call + (is_other ? 20 : 0));
  signature.fields = "m=" + std::to_string(call) + "\nk=" + (is_other || kind == Event::kShape ? "8" : "4");
  signature.groups = GroupsOf(schedule.calls[call]);
  for (size_t i = 0; i < signature.groups.size(); ++i) {
    signature.devices.push_back(int64_t(i));
    signature.processes.push_back(int64_t(i) / schedule.ndevices);
  }
  signature.is_sequential = schedule.ndevices == 1;
  signature.has_tokens = schedule.calls[call].has_tokens;
  known = *Prepare(signature);
  return known;
}

}  // namespace jaxmp::simulation
