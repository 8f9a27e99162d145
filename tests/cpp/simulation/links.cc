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
  job_.At(job_.now + job_.Latency(process_, process), [this, process] {
    Node& peer = *job_.nodes_[size_t(process)];
    if (job_.IsCut(process_, process)) return;
    if (job_.ranks[size_t(process)].has_ended) {
      Post([this, process] { service.Lose(process, "has ended: nothing listens any more"); }, 0);
      return;
    }
    const auto answer = [this, process, &peer] {
      if (rank().has_ended || links.count(process)) return;
      const Time here = job_.Settling(process_, process), there = job_.Settling(process, process_);
      links[process] = there;
      peer.links[process_] = here;
      job_.At(here, [this, process] { Settle(process); });
      job_.At(there, [this, &peer] { peer.Settle(process_); });
    };
    peer.Post(answer, 0);
  });
}

// As Peers._settle: hands this end of a connection over, which the other end may have used for long.
void Job::Node::Settle(int process) {
  const auto settle = [this, process] {
    Node& peer = *job_.nodes_[size_t(process)];
    if (service.CanConnect(process)) {
      ++rank().nsockets;
      service.Connect(process);
    } else {
      links.erase(process);
      peer.Hear(process_, [this, &peer] { peer.service.Close(process_); }, 0);
    }
  };
  Post(settle, 0);
}

// Something comes on the connection with `process`, unless this end has closed it.
void Job::Node::Hear(int process, std::function<void()> what, Time processor) {
  if (job_.IsCut(process_, process)) return;
  Post(
      [this, process, what = std::move(what)] {
        if (links.count(process)) what();
      },
      processor);
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
    Node& peer = *job_.nodes_[size_t(process)];
    peer.Hear(process_, [this, &peer, message] { peer.service.Hear(process_, message); }, job_.schedule.processor);
  });
}

void Job::Node::Exit() {
  if (rank().has_ended) return;
  rank().has_ended = true;
  rank().at = job_.now;
  job_.Log(process_, "has ended");
  for (const auto& [process, last] : links) {
    job_.At(std::max(last + 1, job_.now + job_.Latency(process_, process)), [this, process = process] {
      Node& peer = *job_.nodes_[size_t(process)];
      peer.Hear(process_, [this, &peer] { peer.service.Close(process_); }, 0);
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
