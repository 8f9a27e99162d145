#include "csrc/barrier/service.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace jaxmp::barrier {
namespace {

// How long two processes may wait for each other at different calls before that counts as a disagreement, and how long
// an arrival may take to come through a large circle after a later arrival of the same process.
constexpr std::chrono::milliseconds kCrossed(500);
// For this share of the deadline a process may be a run ahead before the ranks that wait in the earlier run give it up.
// Another thread of that process may still come with the earlier run.
constexpr double kPassed = 0.1;
// Seconds that gloo waits for the others when it opens the transport of a set of devices.
constexpr double kOpening = 30;
constexpr std::chrono::milliseconds kPingInterval(1000);
// How long a connection may take to be made.
constexpr std::chrono::milliseconds kConnecting(1000);
// How long others may take to say how a process has left that has said nothing on its connection.
constexpr std::chrono::milliseconds kLost(500);

}  // namespace

void Peer::Leave(const std::string& how) {
  if (!gone.empty()) return;
  gone = how;
  left = Clock::now();
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
  return is_running_ && is_other && !peers_[process].is_connected;
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
  if (from.spoke) {
    Learn(process, gone, process);
  } else {
    lost_.push_back({process, Clock::now(), gone});
  }
}

void Service::Lose(int process, const std::string& gone) {
  if (!is_running_ || peers_[process].is_connected) return;
  Message message;
  message.text = gone;
  lost_.push_back({process, Clock::now(), message});
}

void Service::Send(int process, const Message& message) {
  Peer& peer = peers_[process];
  if (peer.is_open) {
    transport_->Send(process, message);
  } else if (!peer.is_connected) {
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

bool Service::IsConnecting() const {
  return std::any_of(peers_.begin(), peers_.end(), [now = Clock::now()](const auto& each) {
    const Peer& peer = each.second;
    return peer.is_wanted && !peer.is_connected && peer.gone.empty() && now - peer.heard < kConnecting;
  });
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
    waiting_.push_back({arrival, Clock::now(), Clock::now(), {}, done});
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
std::optional<Status> Service::OutcomeOfWaiting(Waiting& waiting, Clock::time_point now) {
  const Arrival& arrival = waiting.arrival;
  const auto waited = now - waiting.since;
  if (auto outcome = Outcome(arrival)) return outcome;
  const bool is_late = Seconds(waited) > options_.timeout;
  for (const auto& [process, peer] : peers_) Ping(process, now);
  for (int process : arrival.members().processes) {
    if (!arrivals_.Awaits(arrival, process)) continue;
    if (Seconds(waited) > kPassed * options_.timeout && IsSettled(process, arrival, now)) {
      const auto why = arrivals_.HasPassed(arrival, process);
      if (why && !waiting.passed) waiting.passed = now;
      if (why && now - *waiting.passed >= kCrossed) return Fail(arrival, *why, Kind::kAbandon);
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
    const bool is_member = std::binary_search(members.begin(), members.end(), process);
    if ((is_member && arrivals_.Awaits(waiting.arrival, process)) || !IsSilent(process, now)) continue;
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
  for (; !lost_.empty() && now - lost_.front().since >= kLost; lost_.pop_front()) {
    const Lost& lost = lost_.front();
    if (peers_[lost.process].gone.empty()) Learn(lost.process, lost.how, lost.process);
  }
  std::vector<Resumed> settled;
  std::vector<Waiting> still;
  const auto is_over = [this](Dissemination& each) { return Advance(&each); };
  disseminations_.erase(std::remove_if(disseminations_.begin(), disseminations_.end(), is_over), disseminations_.end());
  const bool has_news = std::exchange(has_news_, false);
  for (Waiting& each : waiting_) {
    if (!has_news && now - each.looked < kTick && IsUnderWay(each.arrival)) {
      still.push_back(std::move(each));
      continue;
    }
    each.looked = now;
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
  if (!from.spoke) from.spoke = from.heard;
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
    case Kind::kSummary:
      if (circle) Answer(process, circle, message);
      return;
    case Kind::kFailure:
    case Kind::kAbandon: {
      has_news_ = true;
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

}  // namespace jaxmp::barrier
