#include "csrc/barrier/service.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace jaxmp::barrier {
namespace {

// How long two processes may wait for each other at different calls before that counts as a disagreement.
constexpr std::chrono::milliseconds kCrossed(500);
// For this share of the deadline a process may be a run ahead before the ranks that wait in the earlier run give it up.
// Another thread of that process may still come with the earlier run.
constexpr double kPassed = 0.1;
// Seconds that gloo waits for the others when it opens the transport of a set of devices.
constexpr double kOpening = 30;
constexpr std::chrono::milliseconds kPingInterval(1000);
// For so long after a summary new arrivals make another one.
constexpr std::chrono::milliseconds kAsking(1000);
// Failures of a circle that are remembered.
constexpr size_t kGivenUpKept = 64;
// A process that has not answered for this long is said not to answer.
constexpr std::chrono::milliseconds kSilent(3500);

}  // namespace

void Peer::Leave(const std::string& how) {
  if (!gone.empty()) return;
  gone = how;
  left = Clock::now();
  unsent.clear();
}

// ---- connections

void Service::Want(int process) {
  if (!is_running_ || process == options_.process || process < 0 || process >= options_.nprocesses) return;
  Peer& peer = peers_[process];
  if (std::exchange(peer.is_wanted, true) || peer.is_connected || !peer.gone.empty()) return;
  transport_->Want(process);
}

bool Service::CanConnect(int process) {
  const bool is_other = process != options_.process && process >= 0 && process < options_.nprocesses;
  return is_running_ && is_other && !peers_[process].is_connected && peers_[process].gone.empty();
}

void Service::Connect(int process) {
  Peer& peer = peers_[process];
  peer.is_connected = peer.is_open = true;
  peer.heard = Clock::now();
  for (const Message& message : std::exchange(peer.unsent, {})) transport_->Send(process, message);
  if (goodbye_) transport_->Send(process, *goodbye_);
}

void Service::Close(int process) {
  Peer& from = peers_[process];
  from.is_open = false;
  from.heard = Clock::now();
  Message gone;
  gone.text = "has ended without a word: it was killed, or crashed";
  if (!from.gone.empty()) return;
  if (is_small() || from.has_spoken) {
    Learn(process, gone, process);
  } else {
    lost_.push_back({process, Clock::now(), gone});
  }
}

void Service::Lose(int process, const std::string& gone) {
  if (!is_running_ || peers_[process].is_connected) return;
  Message message;
  message.text = gone;
  if (is_small()) {
    Learn(process, message, process);
  } else {
    lost_.push_back({process, Clock::now(), message});
  }
}

void Service::Send(int process, const Message& message) {
  Peer& peer = peers_[process];
  if (peer.is_open) {
    transport_->Send(process, message);
  } else if (!peer.is_connected && peer.gone.empty()) {
    peer.unsent.push_back(message);
  }
}

void Service::Ping(int process, Clock::time_point now) {
  Peer& peer = peers_[process];
  if (!peer.is_open || now - peer.pinged <= kPingInterval) return;
  peer.pinged = now;
  transport_->Send(process, Message{});
}

void Service::Leave(const std::string& reason) {
  goodbye_.emplace();
  goodbye_->kind = Kind::kGoodbye;
  goodbye_->text = reason;
  for (const auto& [id, circle] : circles_) {
    if (!is_small()) goodbye_->tokens.insert(goodbye_->tokens.end(), {id, circle.Last(options_.process)});
  }
  for (const auto& [process, peer] : peers_) {
    if (peer.is_open) transport_->Send(process, *goodbye_);
  }
}

std::vector<PeerState> Service::States() {
  std::vector<PeerState> result;
  const Clock::time_point now = Clock::now();
  WatchSilence(now);
  for (const auto& [process, peer] : peers_) {
    if (!peer.is_wanted && !peer.is_connected && peer.gone.empty()) continue;
    const double gone_for = peer.gone.empty() ? 0 : Seconds(now - peer.left);
    const double silence = peer.is_open || is_small() || !IsReached(process) ? Seconds(now - peer.heard) : 0;
    result.push_back({process, peer.gone, gone_for, peer.is_clean, silence});
    Ping(process, now);
  }
  for (int process = 0; process < options_.nprocesses && !silent_links_.empty(); ++process) {
    const auto found = peers_.find(process);
    const bool is_known =
        found != peers_.end() && (found->second.is_wanted || found->second.is_connected || !found->second.gone.empty());
    if (is_known || process == options_.process || IsReached(process)) continue;
    result.push_back({process, "", 0, false, Seconds(now - unreached_[static_cast<size_t>(process)])});
  }
  return result;
}

// ---- this process comes

Service::Entered Service::Enter(const std::shared_ptr<const CallSignature>& signature, const Origin& origin,
                                int64_t position, uint64_t token, const Done& done) {
  const auto at = static_cast<size_t>(position);
  const int last = signature->members[static_cast<size_t>(signature->groups[at])].processes.back();
  if (!is_running_) return {FailedPrecondition(signature->call, ": jaxmp.distributed was shut down"), {}, {}};
  if (late_failure_) return {late_failure_, {}, {}};
  if (last >= options_.nprocesses) {
    return {InvalidArgument(signature->call, ": a group names process ", last, " of ", options_.nprocesses), {}, {}};
  }
  if (signature->has_tokens && arrivals_.IsAmbiguous(*signature, at, origin)) {
    return {FailedPrecondition(signature->call,
                               ": two instructions of the compiled program have the number of this call, so that "
                               "ranks cannot tell their operands apart; JAXMP_SHARED_MEMORY=off does without it"),
            {},
            {}};
  }
  const Arrival arrival = arrivals_.Arrive(signature, origin, at, token);
  last_call_ = signature->call;
  Announce(arrival);
  const std::optional<Status> outcome = Outcome(arrival);
  if (!outcome) {
    waiting_.push_back({arrival, Clock::now(), done});
    if (waiting_.size() == 1) transport_->Wake();  // there is a deadline to watch from now on
    return {std::nullopt, {}, arrival};
  }
  std::vector<uint64_t> tokens;
  if (outcome->ok()) tokens = arrivals_.TakeTokens(arrival);
  if (signature->has_tokens && !waiting_.empty()) transport_->Wake();  // others may have waited for this one alone
  return {outcome, std::move(tokens), {}};
}

void Service::FailLate(const Status& status) {
  if (!is_running_ || late_failure_) return;
  late_failure_ = status;
  if (failure_.empty()) failure_ = status.message().substr(std::string("jaxmp.DistributedError: ").size());
}

// ---- is everybody there?

std::optional<Status> Service::Outcome(const Arrival& arrival) {
  arrivals_.PairRuns(arrival);
  if (const auto* failed = arrivals_.failure(arrival)) return GiveUp(arrival, failed->text, failed->kind);
  if (auto why = arrivals_.Disagreement(arrival)) return Fail(arrival, *why);
  bool are_all_here = true;
  for (int process : arrival.members().processes) {
    if (!arrivals_.Awaits(arrival, process)) continue;
    are_all_here = false;
    if (process == options_.process) continue;
    if (!HasLeft(process, arrival.members())) continue;
    return Fail(arrival, "rank " + std::to_string(process) + " " + peers_[process].gone);
  }
  if (!are_all_here) return std::nullopt;
  return Status();
}

// The same, later: the deadline ends the waiting, and so do processes that wait for each other.
std::optional<Status> Service::OutcomeOfWaiting(const Waiting& waiting, Clock::time_point now) {
  const Arrival& arrival = waiting.arrival;
  const auto waited = now - waiting.since;
  if (auto outcome = Outcome(arrival)) return outcome;
  const bool is_late = Seconds(waited) > options_.timeout;
  for (const auto& [process, peer] : peers_) Ping(process, now);
  for (int process : arrival.members().processes) {
    if (!arrivals_.Awaits(arrival, process)) continue;
    if (Seconds(waited) > kPassed * options_.timeout) {
      if (auto why = arrivals_.HasPassed(arrival, process)) return Fail(arrival, *why, Kind::kAbandon);
    }
    if (process == options_.process || (!is_late && (!arrival.signature->is_sequential || waited <= kCrossed)))
      continue;
    if (auto why = arrivals_.Crossing(arrival, process)) return Fail(arrival, *why);
  }
  if (is_late) return Fail(arrival, Missing(waiting, now));
  return std::nullopt;
}

bool Service::IsHeld(const Arrival& arrival, Clock::duration waited) {
  for (int process : arrival.members().processes) {
    if (process == options_.process || !arrivals_.Awaits(arrival, process)) continue;
    if (peers_[process].last_call.empty() &&
        Seconds(waited) < std::max(options_.timeout / 2, options_.timeout - kOpening)) {
      return true;
    }
    if (arrival.signature->is_sequential && waited < 2 * kCrossed && arrivals_.Crossing(arrival, process)) return true;
    if (arrivals_.IsBehind(arrival, process) || arrivals_.HasPassed(arrival, process)) return true;
  }
  return false;
}

// Lists ranks that have not come, and others that do not answer: a rank that has not come may be waiting for one.
std::string Service::Missing(const Waiting& waiting, Clock::time_point now) {
  std::string missing;
  const std::vector<int>& members = waiting.arrival.members().processes;
  for (int process : members) {
    if (!arrivals_.Awaits(waiting.arrival, process)) continue;
    missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(process) + " ";
    missing += process == options_.process ? "has not come with all its devices" : WhyMissing(process, now);
  }
  for (int process = 0; process < options_.nprocesses; ++process) {
    if (std::binary_search(members.begin(), members.end(), process) || !IsSilent(process, now)) continue;
    missing += ", rank " + std::to_string(process) + " does not answer";
  }
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%.3g s", Seconds(now - waiting.since));
  return missing + "; rank " + std::to_string(options_.process) + " has waited for " + waited + " (JAXMP_TIMEOUT)";
}

// This process gives up, and tells the others.
Status Service::Fail(const Arrival& arrival, const std::string& why, Kind kind) {
  return GiveUp(arrival, arrival.signature->call + ": " + why, kind);
}

// Each call of a run that has failed tells its own peers, which may be others than the peers of the first one.
Status Service::GiveUp(const Arrival& arrival, const std::string& text, Kind kind) {
  if (failure_.empty() && kind == Kind::kFailure) failure_ = text;
  arrivals_.Fail(options_.process, arrival.run, kind, text);
  Message message;
  message.kind = kind;
  message.run = arrival.run;
  message.text = text;
  const CallSignature::Group& group = arrival.members();
  if (Circle* const circle = CircleOf(group.circle, group.processes)) Flood(circle, message, options_.process);
  return FailedPrecondition("jaxmp.DistributedError: ", text);
}

std::vector<Resumed> Service::Settle() {
  const Clock::time_point now = Clock::now();
  for (; !lost_.empty() && now - lost_.front().since >= kTick; lost_.pop_front()) {
    const Lost& lost = lost_.front();
    if (peers_[lost.process].gone.empty()) Learn(lost.process, lost.how, lost.process);
  }
  std::vector<Resumed> settled;
  std::vector<Waiting> still;
  const auto is_over = [this](Dissemination& each) { return Advance(&each); };
  disseminations_.erase(std::remove_if(disseminations_.begin(), disseminations_.end(), is_over), disseminations_.end());
  for (Waiting& each : waiting_) {
    if (const std::optional<Status> outcome = OutcomeOfWaiting(each, now)) {
      settled.push_back({std::move(each.done), *outcome, {}});
      if (outcome->ok()) settled.back().tokens = arrivals_.TakeTokens(each.arrival);
    } else {
      still.push_back(std::move(each));
    }
  }
  waiting_ = std::move(still);
  Stir(now);
  TellOfEnds(now);
  return settled;
}

std::vector<Resumed> Service::Stop() {
  std::vector<Resumed> settled;
  is_running_ = false;
  const Status stopped = FailedPrecondition("jaxmp.distributed was shut down");
  for (Waiting& each : waiting_) {
    const auto* failed = arrivals_.failure(each.arrival);
    settled.push_back(
        {std::move(each.done), failed ? FailedPrecondition("jaxmp.DistributedError: ", failed->text) : stopped, {}});
  }
  waiting_.clear();
  return settled;
}

// ---- what others say

void Service::Hear(int process, const Message& message) {
  Peer& from = peers_[process];
  from.heard = Clock::now();
  from.has_spoken = true;
  Circle* const circle = message.members.empty() ? nullptr : CircleOf(message);
  if (!message.members.empty() && !circle) return;
  switch (message.kind) {
    case Kind::kArrival:
    case Kind::kFirst: {
      if (!circle) return;
      const bool is_new = circle->Take(process, message, [this](int who, const Message& arrival) {
        peers_[who].last_call = arrivals_.Hear(who, arrival);
      });
      if (is_new && Clock::now() < circle->asking) circle->is_stirred = is_stirred_ = true;
      return;
    }
    case Kind::kSummary: {
      const Circle::Comparison compared = circle ? circle->Compare(process, message) : Circle::Comparison();
      if (compared.has_more) SendAll(process, circle->ForAll(process));
      if (!compared.lacks) return;
      circle->asking = from.heard + kAsking;
      Send(process, circle->Summary());
      return;
    }
    case Kind::kFailure:
    case Kind::kAbandon: {
      const int origin = message.ranks.empty() ? process : static_cast<int>(message.ranks[0]);
      arrivals_.Fail(origin, static_cast<Run>(message.run), message.kind, message.text);
      if (failure_.empty() && message.kind == Kind::kFailure) failure_ = message.text;
      if (circle && !circle->is_complete()) Flood(circle, message, origin);
      return;
    }
    case Kind::kPing: {
      Message pong;
      pong.kind = Kind::kPong;
      pong.text = last_call_;
      Send(process, pong);
      return;
    }
    case Kind::kPong:
      from.last_call = message.text;
      return;
    case Kind::kGoodbye: {
      Message gone = message;
      gone.count = message.text.empty();
      gone.text = message.text.empty() ? "has ended" : "has ended: " + message.text;
      Learn(process, gone, process);
      return;
    }
    case Kind::kGone:
      for (uint64_t who : message.ranks) {
        if (who < static_cast<uint64_t>(options_.nprocesses)) Learn(static_cast<int>(who), message, process);
      }
      return;
    case Kind::kSilence: {
      if (message.ranks.size() != 2) return;
      const std::pair<int, int> link(message.ranks[0], message.ranks[1]);
      const bool is_new = message.count ? silent_links_.insert(link).second : silent_links_.erase(link) > 0;
      if (!is_new) return;
      has_reached_ = false;
      PassOn(message, process);
      return;
    }
  }
}

// ---- what goes on to others

Circle* Service::CircleOf(uint64_t id, const std::vector<int>& members) {
  const auto found = circles_.find(id);
  if (found != circles_.end()) return &found->second;
  if (!std::binary_search(members.begin(), members.end(), options_.process)) return nullptr;
  Circle& circle = circles_.emplace(id, Circle(members, options_.process)).first->second;
  for (int process : circle.links()) Want(process);
  return &circle;
}

Circle* Service::CircleOf(const Message& message) {
  const std::vector<int> members = Circle::Unpack(message.members, options_.nprocesses);
  return CircleOf(jaxmp::CircleOf(members), members);
}

void Service::SendAll(int process, const std::vector<Message>& messages) {
  for (const Message& message : messages) Send(process, message);
}

void Service::Announce(const Arrival& arrival) {
  const CallSignature::Group& group = arrival.members();
  Circle* const circle = CircleOf(group.circle, group.processes);
  const std::optional<Message> news = arrivals_.Announcement(arrival);
  if (!news || !circle) return;
  circle->Add(*news);
  Dissemination dissemination{arrival};
  if (!Advance(&dissemination)) disseminations_.push_back(dissemination);
}

bool Service::Advance(Dissemination* dissemination) {
  const Arrival& arrival = dissemination->arrival;
  Circle& circle = circles_.at(arrival.members().circle);
  arrivals_.PairRuns(arrival);
  if (arrivals_.failure(arrival)) return true;
  for (size_t& round = dissemination->round; round < circle.rounds(); ++round) {
    for (int process : circle.Needed(round)) {
      if (arrivals_.Awaits(arrival, process)) return false;
    }
    for (int process : circle.Targets(round)) SendAll(process, circle.ForRound(round, process));
  }
  return true;
}

void Service::Stir(Clock::time_point now) {
  std::set<Circle*> stirred;
  for (const Waiting& each : waiting_) {
    const auto found = circles_.find(each.arrival.members().circle);
    if (now - each.since >= kTick && found != circles_.end()) stirred.insert(&found->second);
  }
  for (auto& [id, circle] : circles_) {
    if (circle.is_stirred) stirred.insert(&circle);
  }
  is_stirred_ = false;
  for (Circle* circle : stirred) {
    if (circle->is_complete()) continue;
    const auto since = now - circle->summarised;
    if (since < (circle->is_stirred ? kTick : kPingInterval)) {
      is_stirred_ = is_stirred_ || circle->is_stirred;
      continue;
    }
    circle->asking = now + kAsking;
    circle->is_stirred = false;
    circle->summarised = now;
    const Message summary = circle->Summary();
    for (int process : circle->links()) Send(process, summary);
  }
}

void Service::Flood(Circle* circle, Message message, int origin) {
  if (!circle->is_complete()) {
    if (!circle->failures.insert({message.run, message.kind}).second) return;
    if (circle->failures.size() > kGivenUpKept) circle->failures.erase(circle->failures.begin());
    message.members = circle->packed();
    message.ranks = {static_cast<uint64_t>(origin)};
  }
  for (int process : circle->links()) Send(process, message);
}

void Service::PassOn(const Message& message, int sender) {
  if (is_small()) return;
  for (const auto& [process, peer] : peers_) {
    if (process != sender && peer.is_open) transport_->Send(process, message);
  }
}

// Who left well may still see a failure, and then says so.
void Service::Learn(int process, const Message& gone, int sender) {
  Peer& peer = peers_[process];
  const bool is_clean = gone.count != 0;
  if (process == options_.process || (!peer.gone.empty() && (!peer.is_clean || is_clean))) return;
  peer.gone.clear();
  peer.is_clean = is_clean;
  peer.final = gone.tokens;
  peer.Leave(gone.text);
  has_reached_ = false;
  if (is_small()) return;
  if (is_clean) {  // at the end of a job these are many
    ends_[peer.final].push_back(static_cast<uint64_t>(process));
    return;
  }
  Message news = gone;
  news.kind = Kind::kGone;
  news.ranks = {static_cast<uint64_t>(process)};
  PassOn(news, sender);
}

void Service::TellOfEnds(Clock::time_point now) {
  if (now - told_ < kTick || ends_.empty()) return;
  told_ = now;
  for (auto& [final, processes] : std::exchange(ends_, {})) {
    Message news;
    news.kind = Kind::kGone;
    news.count = 1;
    news.text = "has ended";
    news.tokens = final;
    news.ranks = std::move(processes);
    PassOn(news, options_.process);
  }
}

bool Service::HasLeft(int process, const CallSignature::Group& group) {
  const Peer& peer = peers_[process];
  if (peer.gone.empty() || !peer.is_clean) return !peer.gone.empty();
  for (size_t i = 0; i + 1 < peer.final.size(); i += 2) {
    if (peer.final[i] == group.circle) return circles_.at(group.circle).Last(process) >= peer.final[i + 1];
  }
  return true;
}

// ---- who answers

void Service::WatchSilence(Clock::time_point now) {
  if (is_small()) return;
  for (const auto& [process, peer] : peers_) {
    if (!peer.is_open || !peer.gone.empty()) continue;
    const bool is_silent = now - peer.heard > kSilent;
    const std::pair<int, int> link(options_.process, process);
    if (is_silent == (silent_links_.count(link) > 0)) continue;
    Message message;
    message.kind = Kind::kSilence;
    message.count = is_silent;
    message.ranks = {static_cast<uint64_t>(link.first), static_cast<uint64_t>(link.second)};
    is_silent ? void(silent_links_.insert(link)) : void(silent_links_.erase(link));
    has_reached_ = false;
    PassOn(message, options_.process);
  }
}

bool Service::IsSilent(int process, Clock::time_point now) {
  const auto found = peers_.find(process);
  if (process == options_.process || (found != peers_.end() && !found->second.gone.empty())) return false;
  if (found != peers_.end() && found->second.is_open) return now - found->second.heard > kSilent;
  return !IsReached(process);
}

// Whoever is within reach of one that is reached is reached, but over a link on which nothing comes. All processes have
// links to those 1, 2, 4, ... ranks further on (jaxmp/_src/jobs/bootstrap.py).
bool Service::IsReached(int process) {
  if (silent_links_.empty()) return true;
  if (!has_reached_) {
    has_reached_ = true;
    const int n = options_.nprocesses;
    std::vector<bool> is_reached(static_cast<size_t>(n));
    std::vector<int> next = {options_.process};
    is_reached[static_cast<size_t>(options_.process)] = true;
    while (!next.empty()) {
      const int at = next.back();
      next.pop_back();
      for (int reach = 1; reach < n; reach *= 2) {
        for (int to : {(at + reach) % n, (at + n - reach) % n}) {
          if (is_reached[static_cast<size_t>(to)] || silent_links_.count({at, to}) || silent_links_.count({to, at}))
            continue;
          is_reached[static_cast<size_t>(to)] = true;
          const auto found = peers_.find(to);
          if (found == peers_.end() || found->second.gone.empty()) next.push_back(to);
        }
      }
    }
    unreached_.resize(static_cast<size_t>(n));
    for (size_t i = 0; i < is_reached.size(); ++i) {
      if (is_reached[i]) {
        unreached_[i] = {};
      } else if (unreached_[i] == Clock::time_point()) {
        unreached_[i] = Clock::now() - kSilent;
      }
    }
  }
  return unreached_[static_cast<size_t>(process)] == Clock::time_point();
}

std::string Service::WhyMissing(int process, Clock::time_point now) {
  const Peer& peer = peers_[process];
  const bool is_direct = peer.is_open || is_small();
  if (is_direct ? now - peer.heard > kSilent : !IsReached(process)) {
    return "has not come and does not answer: it is stopped, or its machine or network is gone";
  }
  if (!is_direct && peer.last_call.empty()) return "has not come; it is alive";
  return "has not come; it is alive, " +
         (peer.last_call.empty() ? "and has come to no call yet" : "the last call it came to is " + peer.last_call);
}

}  // namespace jaxmp::barrier
