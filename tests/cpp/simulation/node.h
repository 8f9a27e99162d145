// A rank of a simulated job: its process barrier, its connections, and its program.
#ifndef JAXMP_TESTS_SIMULATION_NODE_H_
#define JAXMP_TESTS_SIMULATION_NODE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/simulation/job.h"

namespace jaxmp::simulation {

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
  void Send(int process, const barrier::Message& message) override;
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

  barrier::Service service;
  std::vector<Strand> strands;
  std::map<int, Time> links;  // by process: when its end is ready, or the last message to it comes

 private:
  struct Outcome {
    bool is_known = false, is_late = false;  // it comes after the device has gone on
  };
  Rank& rank() { return job_.ranks[size_t(process_)]; }
  void Turn();
  void Compile();
  void Settle();
  void Settle(int process);
  void Hear(int process, std::function<void()> what, Time processor);
  void Come(Strand* strand);
  void Enter(Strand* strand, size_t call);
  void Hold(Strand* strand, size_t call, const barrier::Arrival& arrival, Time since, std::shared_ptr<Outcome> outcome);
  void Collect(Strand* strand, size_t call);
  void GoOn(Strand* strand);
  void Fail(Strand* strand, const std::string& message);
  void End(const std::string& reason);
  void ExitOnceConnected();
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

}  // namespace jaxmp::simulation

#endif  // JAXMP_TESTS_SIMULATION_NODE_H_
