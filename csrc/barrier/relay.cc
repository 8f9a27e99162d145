// The part of the process barrier that passes on what others say: arrivals in circles, failures, ends and silence.
#include <algorithm>
#include <utility>

#include "csrc/barrier/service.h"

namespace jaxmp::barrier {
namespace {

// How often a rank that waits tells which arrivals it has, if nothing changes.
constexpr std::chrono::milliseconds kSummaryInterval(1000);
// For so long after a summary new arrivals make another one.
constexpr std::chrono::milliseconds kAsking(1000);
// Failures of a circle that are remembered.
constexpr size_t kGivenUpKept = 64;
// A process that has not answered for this long is said not to answer.
constexpr std::chrono::milliseconds kSilent(3500);

}  // namespace

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
  if (arrivals_.HasFailed(arrival.run)) return true;
  for (size_t& round = dissemination->round; round < circle.rounds(); ++round) {
    for (int process : circle.Needed(round)) {
      arrivals_.PairRuns(arrival, process);
      if (arrivals_.Awaits(arrival, process)) return false;
    }
    for (int process : circle.Targets(round)) SendAll(process, circle.ForRound(round, process));
  }
  return true;
}

// The outcome of such an arrival is not known, unless something unusual is.
bool Service::IsUnderWay(const Arrival& arrival) const {
  return std::any_of(disseminations_.begin(), disseminations_.end(), [&arrival](const Dissemination& each) {
    return each.arrival.run == arrival.run && each.arrival.members().key == arrival.members().key;
  });
}

bool Service::IsSettled(int process, const Arrival& arrival, Clock::time_point now) {
  const Circle& circle = circles_.at(arrival.members().circle);
  return std::all_of(circle.links().begin(), circle.links().end(), [&](int link) {
    const auto spoke = peers_[link].spoke;
    return (spoke && now - *spoke >= kTick) || (circle.is_complete() && link != process);
  });
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
    if (since < (circle->is_stirred ? kTick : kSummaryInterval)) {
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

void Service::Answer(int process, Circle* circle, const Message& summary) {
  const Circle::Comparison compared = circle->Compare(process, summary);
  if (compared.has_more) SendAll(process, circle->ForAll(process));
  if (!compared.lacks) return;
  circle->asking = Clock::now() + kAsking;
  Send(process, circle->Summary());
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
  has_news_ = true;
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
  if (peer.gone.empty()) return false;
  if (!peer.is_clean) return is_small() || Clock::now() - peer.left >= kTick;
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
          next.push_back(to);
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
