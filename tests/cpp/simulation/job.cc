#include "tests/cpp/simulation/job.h"

#include <algorithm>
#include <cstdio>

#include "tests/cpp/simulation/node.h"

namespace jaxmp::simulation {
namespace {

using barrier::Clock;

Time virtual_now = 0;
Clock::time_point VirtualNow() { return Clock::time_point(std::chrono::nanoseconds(virtual_now)); }

}  // namespace

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
    At(kSecond / 10, [&node] { node->Start(); });
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

Time Job::Settling(int process, int peer) {
  const Time late = schedule.settling && Draw() % 4 == 0 ? Time(Draw()) % schedule.settling : 0;
  return now + Latency(peer, process) + late;
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
