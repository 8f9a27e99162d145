// The program of a simulated rank, from its first call to its end.
#include <algorithm>

#include "tests/cpp/simulation/node.h"

namespace jaxmp::simulation {
namespace {

using barrier::Arrival;
using barrier::Service;

// As in jaxmp/_src/jobs/watch.py.
constexpr Time kPeriod = kSecond / 4, kSettles = kSecond * 3 / 2;
const char kSilent[] = "does not answer: it is stopped, or its machine or network is gone";

uint64_t TokenOf(int64_t device, int step, size_t call) {
  return static_cast<uint64_t>(device) * 1'000'000 + static_cast<uint64_t>(step) * 1000 + call;
}

}  // namespace

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
  bool is_known = !why.empty();
  for (const PeerState& peer : service.States()) {
    if (!service.failure().empty() || peer.gone.empty()) continue;
    is_known = is_known || !peer.is_clean || job_.schedule.nprocesses <= 5;
    const std::string who = "rank " + std::to_string(peer.process) + " " + peer.gone;
    if (first.empty()) first = who;
    if (who.find(": rank ") == std::string::npos) why += (why.empty() ? "" : ", ") + who;
  }
  if (why.empty()) why = first;
  if (!is_known && job_.now - since < kSecond) {
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
  ExitOnceConnected();
}

// As LeaveBarrier: a rank that is connected late hears the reason.
void Job::Node::ExitOnceConnected() {
  Later(job_.now + kMilli, [this] {
    if (service.IsConnecting()) {
      ExitOnceConnected();
    } else {
      Exit();
    }
  });
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

}  // namespace jaxmp::simulation
