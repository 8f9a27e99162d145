// The threads and connections of a simulated rank.
#include <algorithm>

#include "tests/cpp/simulation/node.h"

namespace jaxmp::simulation {

using barrier::Kind;
using barrier::Message;

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

}  // namespace jaxmp::simulation
