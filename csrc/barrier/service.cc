#include "csrc/barrier/service.h"

#include <poll.h>
#include <unistd.h>

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
// A process that has not answered for this long is said not to answer.
constexpr std::chrono::milliseconds kSilent(3500);

}  // namespace

void Peer::Connect(int fd) {
  is_connected = true;
  heard = Clock::now();
  socket = Socket(fd);
  for (const Message& message : unsent) socket.Send(message);
  unsent.clear();
}

void Peer::Leave(const std::string& how) {
  if (!gone.empty()) return;
  gone = how;
  left = Clock::now();
  unsent.clear();
}

void Peer::Send(const Message& message) {
  if (socket.is_open()) {
    socket.Send(message);
  } else if (!is_connected && gone.empty()) {
    unsent.push_back(message);
  }
}

void Peer::Ping(Clock::time_point now) {
  if (!socket.is_open() || now - pinged <= kPingInterval) return;
  pinged = now;
  socket.Send(Message{});
}

bool Peer::IsSilent(Clock::time_point now) const { return socket.is_open() && now - heard > kSilent; }

std::string Peer::WhyMissing(Clock::time_point now) const {
  if (now - heard > kSilent) {
    return "has not come and does not answer: it is stopped, or its machine or network is gone";
  }
  return "has not come; it is alive, " +
         (last_call.empty() ? "and has come to no call yet" : "the last call it came to is " + last_call);
}

void Service::Want(int process) {
  if (process == options.process || process < 0 || process >= options.nprocesses) return;
  Peer& peer = peers[process];
  if (std::exchange(peer.is_wanted, true) || peer.is_connected || !peer.gone.empty()) return;
  wanted.push_back(process);
  has_wanted.notify_one();
}

void Service::Send(const Arrival& arrival, const Message& message) {
  for (int process : arrival.members().processes) {
    if (process != options.process) peers[process].Send(message);
  }
}

// ---- is everybody there?

std::optional<Status> Service::Outcome(const Arrival& arrival) {
  arrivals.PairRuns(arrival);
  if (const auto* failed = arrivals.failure(arrival)) return GiveUp(arrival, failed->text, failed->kind);
  if (auto why = arrivals.Disagreement(arrival)) return Fail(arrival, *why);
  bool are_all_here = true;
  for (int process : arrival.members().processes) {
    if (!arrivals.Awaits(arrival, process)) continue;
    are_all_here = false;
    if (process == options.process) continue;
    if (!peers[process].gone.empty())
      return Fail(arrival, "rank " + std::to_string(process) + " " + peers[process].gone);
  }
  if (!are_all_here) return std::nullopt;
  return Status();
}

// The same, later: the deadline ends the waiting, and so do processes that wait for each other.
std::optional<Status> Service::OutcomeOfWaiting(const Waiting& waiting, Clock::time_point now) {
  const Arrival& arrival = waiting.arrival;
  const auto waited = now - waiting.since;
  if (auto outcome = Outcome(arrival)) return outcome;
  const bool is_late = Seconds(waited) > options.timeout;
  for (auto& [process, peer] : peers) peer.Ping(now);
  for (int process : arrival.members().processes) {
    if (!arrivals.Awaits(arrival, process)) continue;
    if (Seconds(waited) > kPassed * options.timeout) {
      if (auto why = arrivals.HasPassed(arrival, process)) return Fail(arrival, *why, Kind::kAbandon);
    }
    if (process == options.process || (!is_late && (!arrival.signature->is_sequential || waited <= kCrossed))) continue;
    if (auto why = arrivals.Crossing(arrival, process)) return Fail(arrival, *why);
  }
  if (is_late) return Fail(arrival, Missing(waiting, now));
  return std::nullopt;
}

bool Service::IsHeld(const Arrival& arrival, Clock::duration waited) {
  for (int process : arrival.members().processes) {
    if (process == options.process || !arrivals.Awaits(arrival, process)) continue;
    if (peers[process].last_call.empty() &&
        Seconds(waited) < std::max(options.timeout / 2, options.timeout - kOpening)) {
      return true;
    }
    if (arrival.signature->is_sequential && waited < 2 * kCrossed && arrivals.Crossing(arrival, process)) return true;
    if (arrivals.IsBehind(arrival, process) || arrivals.HasPassed(arrival, process)) return true;
  }
  return false;
}

// Lists ranks that have not come, and others that do not answer: a rank that has not come may be waiting for one.
std::string Service::Missing(const Waiting& waiting, Clock::time_point now) {
  std::string missing;
  const std::vector<int>& members = waiting.arrival.members().processes;
  for (int process : members) {
    if (!arrivals.Awaits(waiting.arrival, process)) continue;
    missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(process) + " ";
    missing += process == options.process ? "has not come with all its devices" : peers[process].WhyMissing(now);
  }
  for (const auto& [process, peer] : peers) {
    if (std::binary_search(members.begin(), members.end(), process) || !peer.IsSilent(now)) continue;
    missing += ", rank " + std::to_string(process) + " does not answer";
  }
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%.3g s", Seconds(now - waiting.since));
  return missing + "; rank " + std::to_string(options.process) + " has waited for " + waited + " (JAXMP_TIMEOUT)";
}

// This process gives up, and tells the others.
Status Service::Fail(const Arrival& arrival, const std::string& why, Kind kind) {
  return GiveUp(arrival, arrival.signature->call + ": " + why, kind);
}

// Each call of a run that has failed tells its own peers, which may be others than the peers of the first one.
Status Service::GiveUp(const Arrival& arrival, const std::string& text, Kind kind) {
  if (failure.empty() && kind == Kind::kFailure) failure = text;
  arrivals.Fail(options.process, arrival.run, kind, text);
  Message message;
  message.kind = kind;
  message.run = arrival.run;
  message.text = text;
  Send(arrival, message);
  return FailedPrecondition("jaxmp.DistributedError: ", text);
}

std::vector<Resumed> Service::Settle() {
  const Clock::time_point now = Clock::now();
  std::vector<Resumed> settled;
  std::vector<Waiting> still;
  for (Waiting& each : waiting) {
    if (const std::optional<Status> outcome = OutcomeOfWaiting(each, now)) {
      settled.push_back({std::move(each.done), *outcome, {}});
      if (outcome->ok()) settled.back().tokens = arrivals.TakeTokens(each.arrival);
    } else {
      still.push_back(std::move(each));
    }
  }
  waiting = std::move(still);
  return settled;
}

// Under no lock: programs come to their next call from here.
void Service::Resume(std::vector<Resumed> settled) {
  for (Resumed& each : settled) {
    completions.Post([each = std::move(each)] { each.done(each.status, each.tokens); });
  }
}

// ---- the thread that reads

void Service::Serve() {
  std::unique_lock<std::mutex> lock(mutex);
  while (is_running) {
    std::vector<pollfd> polled = {{wake[0], POLLIN, 0}};
    std::vector<int> readable;
    for (const auto& [process, peer] : peers) {
      if (!peer.socket.is_open()) continue;
      const int events = POLLIN | (peer.socket.has_unsent() ? POLLOUT : 0);
      polled.push_back({peer.socket.fd(), static_cast<int16_t>(events), 0});
      readable.push_back(process);
    }
    const int poll_timeout = waiting.empty() ? -1 : 100;
    lock.unlock();
    poll(polled.data(), polled.size(), poll_timeout);
    lock.lock();
    if (!is_running) return;
    char bytes[64];
    while (polled[0].revents && read(wake[0], bytes, sizeof(bytes)) > 0) {
    }
    for (size_t i = 0; i < readable.size(); ++i) {
      if (polled[i + 1].revents) Read(readable[i]);
    }
    std::vector<Resumed> settled = Settle();
    lock.unlock();
    Resume(std::move(settled));
    lock.lock();
  }
}

void Service::Wake() {
  const char byte = 0;
  if (wake[1] >= 0 && write(wake[1], &byte, 1) < 0) return;  // full: it is awake
}

void Service::Read(int process) {
  Peer& from = peers[process];
  from.socket.Flush();
  std::vector<Message> messages;
  const bool is_open = from.socket.Receive(&messages);
  from.heard = Clock::now();
  for (const Message& message : messages) Handle(process, message);
  if (!is_open) from.Leave("has ended without a word: it was killed, or crashed");
}

void Service::Handle(int process, const Message& message) {
  Peer& from = peers[process];
  switch (message.kind) {
    case Kind::kArrival:
    case Kind::kFirst:
      from.last_call = arrivals.Hear(process, message);
      return;
    case Kind::kFailure:
    case Kind::kAbandon:
      arrivals.Fail(process, static_cast<Run>(message.run), message.kind, message.text);
      if (failure.empty() && message.kind == Kind::kFailure) failure = message.text;
      return;
    case Kind::kPing: {
      Message pong;
      pong.kind = Kind::kPong;
      pong.text = last_call;
      from.Send(pong);
      return;
    }
    case Kind::kPong:
      from.last_call = message.text;
      return;
    case Kind::kGoodbye:
      if (from.is_clean) from.gone.clear();  // who left well may still see a failure, and then says so
      from.is_clean = message.text.empty();
      from.Leave(message.text.empty() ? "has ended" : "has ended: " + message.text);
      return;
  }
}

}  // namespace jaxmp::barrier
