#include "csrc/rollcall/rollcall.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "csrc/rollcall/wire.h"

namespace jaxmp {
namespace {

using rollcall::Kind;
using rollcall::Message;
using rollcall::Socket;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long two processes may wait for each other at different calls before that counts as a disagreement.
constexpr milliseconds kCrossed(500);
constexpr milliseconds kPingInterval(1000);
// A process that has not answered for this long is said not to answer.
constexpr milliseconds kSilent(3500);
// Calls whose failure is remembered for those who come late.
constexpr size_t kFailuresKept = 8;

// FNV-1a: the same in every process, which std::hash need not be.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3u;
  return hash;
}

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

std::string Join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

std::map<std::string, std::string> FieldsOf(const std::string& fields) {
  std::map<std::string, std::string> result;
  for (size_t begin = 0; begin < fields.size();) {
    const size_t end = std::min(fields.find('\n', begin), fields.size());
    const std::string line = fields.substr(begin, end - begin);
    const size_t equals = line.find('=');
    if (equals != std::string::npos) result[line.substr(0, equals)] = line.substr(equals + 1);
    begin = end + 1;
  }
  return result;
}

// "rank 2 has k=4096, rank 0 has k=4095", for every field in which the two differ.
std::string Differences(int one, const std::string& fields, int other, const std::string& other_fields) {
  std::map<std::string, std::string> mine = FieldsOf(fields), theirs = FieldsOf(other_fields);
  std::vector<std::string> left, right;
  for (const auto& [name, value] : theirs) mine.emplace(name, "none");
  for (const auto& [name, value] : mine) {
    const auto found = theirs.find(name);
    const std::string counterpart = found == theirs.end() ? "none" : found->second;
    if (value == counterpart) continue;
    left.push_back(name + "=" + value);
    right.push_back(name + "=" + counterpart);
  }
  if (left.empty()) return "rank " + std::to_string(one) + " and rank " + std::to_string(other) + " differ";
  return "rank " + std::to_string(one) + " has " + Join(left, " ") + ", rank " + std::to_string(other) + " has " +
         Join(right, " ");
}

// Threads on which programs resume. They may block there, so one is added whenever none is idle, and kept.
class Resumptions {
 public:
  void Post(std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    if (waiting_.size() <= idle_) {
      lock.unlock();
      wake_.notify_one();
    } else {
      std::thread([this] { Serve(); }).detach();
    }
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
  size_t idle_ = 0;
};

struct Peer {
  explicit Peer(int fd) : socket(fd) {}

  Socket socket;
  std::string gone;  // how it left; empty while it is there
  bool is_clean = false;
  Clock::time_point heard = Clock::now(), pinged = Clock::now();
  std::string last_call;
};

// What one peer has said about one call.
struct Said {
  uint64_t count = 0;                   // how often it has come
  std::map<uint64_t, uint64_t> digest;  // by count, of the calls that are not settled here
};

struct Waiting {
  std::shared_ptr<const Appointment> appointment;
  size_t group;
  uint64_t count;
  Clock::time_point since;
  std::function<void(const Status&)> done;
};

// One call on one set of devices.
struct Entry {
  uint64_t program = 0, label = 0;
  std::map<int64_t, uint64_t> arrived;  // by device of this process
  uint64_t announced = 0;
  std::map<int, Said> said;           // by peer
  std::set<uint64_t> described;       // digests whose text the peers have
  std::map<uint64_t, Status> failed;  // by count
  std::vector<Waiting> waiting;
};

class Book {
 public:
  void Start(const RollCallOptions& options);
  void Leave(const std::string& reason);
  void Stop();
  void Arrive(const std::shared_ptr<const Appointment>& appointment, int64_t position,
              std::function<void(const Status&)> done);
  std::string failure();
  std::string last_call();
  std::vector<PeerState> peers();

 private:
  using Settled = std::vector<std::pair<std::function<void(const Status&)>, Status>>;

  void Serve();
  void Read(int process);
  void Handle(int process, const Message& message);
  void DrainInterrupts();
  void Announce(Entry& entry, const Waiting& waiting);
  std::optional<Status> Outcome(Entry& entry, const Waiting& waiting);
  std::optional<std::string> Disagreement(const Entry& entry, const Waiting& waiting);
  std::optional<std::string> Crossing(const Entry& entry, const Waiting& waiting, int process);
  std::string Missing(const Entry& entry, const Waiting& waiting, Clock::time_point now);
  Status Fail(Entry& entry, const Waiting& waiting, const std::string& why, bool tells_peers);
  void Settle(Entry& entry, Settled* settled);
  void SettleAll(std::unique_lock<std::mutex>& lock);
  bool is_waiting() const;
  Peer& peer(int process) { return peers_[static_cast<size_t>(process)]; }
  void Wake();

  std::mutex mutex_;
  bool is_running_ = false;
  RollCallOptions options_;
  std::vector<Peer> peers_;
  std::map<uint64_t, Entry> entries_;
  std::map<uint64_t, std::string> texts_;  // by digest: the call, a newline, its fields
  std::string failure_, last_call_;
  bool is_interrupted_ = false;
  int wake_[2] = {-1, -1};
  std::thread thread_;
  Resumptions resumptions_;
};

// Never destroyed: its threads outlive main.
Book& book() {
  static auto* const the_book = new Book;
  return *the_book;
}

void Book::Start(const RollCallOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  options_ = options;
  peers_.clear();
  for (int fd : options.sockets) peers_.emplace_back(fd);
  entries_.clear();
  texts_.clear();
  failure_.clear();
  last_call_.clear();
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) wake_[0] = wake_[1] = -1;
  is_running_ = true;
  thread_ = std::thread([this] { Serve(); });
}

void Book::Leave(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  Message goodbye;
  goodbye.kind = Kind::kGoodbye;
  goodbye.text = reason;
  for (Peer& peer : peers_) {
    if (peer.socket.is_open()) peer.socket.Send(goodbye);
  }
}

void Book::Stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!is_running_) return;
    is_running_ = false;
    for (auto& [key, entry] : entries_) {
      for (const Waiting& waiting : entry.waiting) {
        entry.failed.emplace(waiting.count, Status(Code::kFailedPrecondition, "jaxmp.distributed was shut down"));
      }
    }
    SettleAll(lock);
  }
  Wake();
  thread_.join();
  std::lock_guard<std::mutex> lock(mutex_);
  peers_.clear();
  for (int& fd : wake_) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

void Book::Wake() {
  const char byte = 0;
  if (wake_[1] >= 0 && write(wake_[1], &byte, 1) < 0) return;  // full: it is awake
}

bool Book::is_waiting() const {
  return std::any_of(entries_.begin(), entries_.end(), [](const auto& item) { return !item.second.waiting.empty(); });
}

// ---- a device comes

void Book::Arrive(const std::shared_ptr<const Appointment>& appointment, int64_t position,
                  std::function<void(const Status&)> done) {
  const size_t at = static_cast<size_t>(position);
  const size_t group = static_cast<size_t>(appointment->groups[at]);
  const Appointment::Group& members = appointment->members[group];
  std::optional<Status> outcome;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_running_) {
      outcome = FailedPrecondition(appointment->call + ": jaxmp.distributed was shut down");
    } else if (members.processes.back() >= static_cast<int>(peers_.size())) {
      outcome = InvalidArgument(appointment->call + ": a group names process " +
                                std::to_string(members.processes.back()) + " of " + std::to_string(peers_.size()));
    } else {
      Entry& entry = entries_[members.key];
      entry.program = appointment->program_hash;
      entry.label = appointment->label;
      const Waiting waiting{appointment, group, ++entry.arrived[appointment->devices[at]], Clock::now(), done};
      last_call_ = appointment->call;
      if (waiting.count > entry.announced) Announce(entry, waiting);
      outcome = Outcome(entry, waiting);
      if (!outcome) {
        const bool is_first = !is_waiting();
        entry.waiting.push_back(waiting);
        if (is_first) Wake();  // the thread has a deadline to watch from now on
      }
    }
  }
  if (outcome) done(*outcome);
}

void Book::Announce(Entry& entry, const Waiting& waiting) {
  const Appointment& appointment = *waiting.appointment;
  entry.announced = waiting.count;
  Message message;
  message.kind = Kind::kArrival;
  message.program = appointment.program_hash;
  message.label = appointment.label;
  message.key = appointment.members[waiting.group].key;
  message.count = waiting.count;
  message.digest = appointment.digest;
  if (entry.described.insert(appointment.digest).second) message.text = appointment.call + "\n" + appointment.fields;
  for (int process : appointment.members[waiting.group].processes) {
    if (process != options_.process && peer(process).socket.is_open()) peer(process).socket.Send(message);
  }
}

// ---- is everybody there?

std::optional<Status> Book::Outcome(Entry& entry, const Waiting& waiting) {
  if (const auto found = entry.failed.find(waiting.count); found != entry.failed.end()) return found->second;
  if (options_.compares) {
    if (auto why = Disagreement(entry, waiting)) return Fail(entry, waiting, *why, true);
  }
  bool are_all_here = true;
  for (int process : waiting.appointment->members[waiting.group].processes) {
    if (process == options_.process || entry.said[process].count >= waiting.count) continue;
    are_all_here = false;
    if (!peer(process).gone.empty()) {
      return Fail(entry, waiting, "rank " + std::to_string(process) + " " + peer(process).gone, true);
    }
  }
  if (!are_all_here) return std::nullopt;
  for (auto& [process, said] : entry.said)
    said.digest.erase(said.digest.begin(), said.digest.lower_bound(waiting.count));
  return Status();
}

std::optional<std::string> Book::Disagreement(const Entry& entry, const Waiting& waiting) {
  for (const auto& [process, said] : entry.said) {
    const auto found = said.digest.find(waiting.count);
    if (found == said.digest.end() || found->second == waiting.appointment->digest) continue;
    const std::string theirs = texts_[found->second];
    return Differences(process, theirs.substr(std::min(theirs.find('\n'), theirs.size())), options_.process,
                       waiting.appointment->fields);
  }
  return std::nullopt;
}

// Two processes that wait for each other at different calls, which no order of independent calls explains: different
// programs, or the same call on other devices.
std::optional<std::string> Book::Crossing(const Entry& entry, const Waiting& waiting, int process) {
  for (const auto& [key, other] : entries_) {
    const auto said = other.said.find(process);
    if (&other == &entry || said == other.said.end() || said->second.count <= other.announced) continue;
    if (other.failed.count(said->second.count)) continue;
    if (other.program == entry.program && other.label != entry.label) continue;
    const auto digest = said->second.digest.find(said->second.count);
    const std::string text = digest == said->second.digest.end() ? "" : texts_[digest->second];
    const size_t end = std::min(text.find('\n'), text.size());
    if (other.label == entry.label) {
      return Differences(process, text.substr(end), options_.process, waiting.appointment->fields);
    }
    return "the ranks run different programs: rank " + std::to_string(process) + " waits in " + text.substr(0, end) +
           ", rank " + std::to_string(options_.process) + " in " + waiting.appointment->call;
  }
  return std::nullopt;
}

std::string Book::Missing(const Entry& entry, const Waiting& waiting, Clock::time_point now) {
  std::vector<std::string> missing;
  for (int process : waiting.appointment->members[waiting.group].processes) {
    const auto said = entry.said.find(process);
    if (process == options_.process || (said != entry.said.end() && said->second.count >= waiting.count)) continue;
    std::string text = "rank " + std::to_string(process) + " has not come";
    if (now - peer(process).heard > kSilent) {
      text += " and does not answer: it is stopped, or its machine or network is gone";
    } else {
      const std::string& last = peer(process).last_call;
      text +=
          "; it is alive, " + (last.empty() ? "and has come to no call yet" : "the last call it came to is " + last);
    }
    missing.push_back(text);
  }
  return Join(missing, ", ") + "; rank " + std::to_string(options_.process) + " has waited for " +
         Seconds(std::chrono::duration<double>(now - waiting.since).count()) + " (JAXMP_TIMEOUT)";
}

Status Book::Fail(Entry& entry, const Waiting& waiting, const std::string& why, bool tells_peers) {
  const Appointment& appointment = *waiting.appointment;
  const std::string text = appointment.call + ": " + why;
  const Status status = FailedPrecondition("jaxmp.DistributedError: " + text);
  if (failure_.empty()) failure_ = text;
  entry.failed.emplace(waiting.count, status);
  if (entry.failed.size() > kFailuresKept) entry.failed.erase(entry.failed.begin());
  if (!tells_peers) return status;
  Message message;
  message.kind = Kind::kFailure;
  message.key = appointment.members[waiting.group].key;
  message.count = waiting.count;
  message.text = text;
  for (int process : appointment.members[waiting.group].processes) {
    if (process != options_.process && peer(process).socket.is_open()) peer(process).socket.Send(message);
  }
  return status;
}

// ---- the thread that reads

void Book::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (is_running_) {
    std::vector<pollfd> polled = {{wake_[0], POLLIN, 0}, {options_.interrupts, POLLIN, 0}};
    for (const Peer& peer : peers_) {
      const int events = POLLIN | (peer.socket.has_unsent() ? POLLOUT : 0);
      polled.push_back({peer.socket.fd(), static_cast<int16_t>(events), 0});  // poll passes over negative ones
    }
    const int patience = is_waiting() ? 100 : -1;
    lock.unlock();
    poll(polled.data(), polled.size(), patience);
    lock.lock();
    if (!is_running_) return;
    char bytes[64];
    while (polled[0].revents && read(wake_[0], bytes, sizeof(bytes)) > 0) {
    }
    if (polled[1].revents) DrainInterrupts();
    for (size_t process = 0; process < peers_.size(); ++process) {
      if (polled[process + 2].revents) Read(static_cast<int>(process));
    }
    SettleAll(lock);
  }
}

// Python writes the number of each signal that it has a handler for.
void Book::DrainInterrupts() {
  char bytes[64];
  for (ssize_t got; (got = read(options_.interrupts, bytes, sizeof(bytes))) > 0;) {
    is_interrupted_ |= std::find(bytes, bytes + got, char(2)) != bytes + got;  // SIGINT
  }
}

void Book::Read(int process) {
  Peer& from = peer(process);
  from.socket.Flush();
  std::vector<Message> messages;
  const bool is_open = from.socket.Receive(&messages);
  from.heard = Clock::now();
  for (const Message& message : messages) Handle(process, message);
  if (!is_open && from.gone.empty()) from.gone = "has ended without a word: it was killed, or crashed";
}

void Book::Handle(int process, const Message& message) {
  switch (message.kind) {
    case Kind::kArrival: {
      Entry& entry = entries_[message.key];
      entry.program = message.program;
      entry.label = message.label;
      Said& said = entry.said[process];
      said.count = message.count;
      said.digest[message.count] = message.digest;
      const std::string& text = message.text.empty() ? texts_[message.digest] : texts_[message.digest] = message.text;
      peer(process).last_call = text.substr(0, text.find('\n'));
      return;
    }
    case Kind::kFailure:
      entries_[message.key].failed.emplace(message.count,
                                           FailedPrecondition("jaxmp.DistributedError: " + message.text));
      if (failure_.empty()) failure_ = message.text;
      return;
    case Kind::kPing: {
      Message pong;
      pong.kind = Kind::kPong;
      pong.text = last_call_;
      peer(process).socket.Send(pong);
      return;
    }
    case Kind::kPong:
      peer(process).last_call = message.text;
      return;
    case Kind::kGoodbye:
      peer(process).is_clean = message.text.empty();
      peer(process).gone = message.text.empty() ? "has ended" : "has ended: " + message.text;
      return;
  }
}

void Book::Settle(Entry& entry, Settled* settled) {
  const Clock::time_point now = Clock::now();
  std::vector<Waiting> still;
  for (Waiting& waiting : entry.waiting) {
    std::optional<Status> outcome = Outcome(entry, waiting);
    const auto waited = now - waiting.since;
    if (!outcome && is_interrupted_) outcome = Fail(entry, waiting, "interrupted by the user", true);
    if (!outcome && waited > std::chrono::duration<double>(options_.timeout)) {
      outcome = Fail(entry, waiting, Missing(entry, waiting, now), true);
    }
    for (int process : waiting.appointment->members[waiting.group].processes) {
      if (outcome || process == options_.process || entry.said[process].count >= waiting.count) continue;
      Peer& missing = peer(process);
      if (now - missing.pinged > kPingInterval && missing.socket.is_open()) {
        missing.pinged = now;
        missing.socket.Send(Message{});
      }
      if (options_.compares && waiting.appointment->is_sequential && waited > kCrossed) {
        if (auto why = Crossing(entry, waiting, process)) outcome = Fail(entry, waiting, *why, true);
      }
    }
    if (outcome) {
      settled->emplace_back(std::move(waiting.done), *outcome);
    } else {
      still.push_back(std::move(waiting));
    }
  }
  entry.waiting = std::move(still);
}

void Book::SettleAll(std::unique_lock<std::mutex>& lock) {
  Settled settled;
  for (auto& [key, entry] : entries_) {
    if (!entry.waiting.empty()) Settle(entry, &settled);
  }
  is_interrupted_ = false;
  lock.unlock();
  for (auto& [done, status] : settled) {
    resumptions_.Post([done = std::move(done), status = std::move(status)] { done(status); });
  }
  lock.lock();
}

std::string Book::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::string Book::last_call() {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_call_;
}

// Asks every peer for a sign of life, so that the next answer is up to date.
std::vector<PeerState> Book::peers() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PeerState> result;
  const Clock::time_point now = Clock::now();
  for (Peer& peer : peers_) {
    result.push_back({peer.gone, peer.is_clean, std::chrono::duration<double>(now - peer.heard).count()});
    if (!peer.socket.is_open() || now - peer.pinged < kPingInterval) continue;
    peer.pinged = now;
    peer.socket.Send(Message{});
  }
  return result;
}

}  // namespace

StatusOr<std::shared_ptr<const Appointment>> Prepare(Appointment appointment) {
  const size_t size = appointment.devices.size();
  if (appointment.processes.size() != size || appointment.groups.size() != size || size == 0) {
    return InvalidArgument(
        "jaxmp: a roll call needs a device, a process and a group for each position in the mesh, got " +
        std::to_string(size) + ", " + std::to_string(appointment.processes.size()) + " and " +
        std::to_string(appointment.groups.size()));
  }
  appointment.program_hash = Hash(appointment.program);
  const std::string label = appointment.program + "#" + std::to_string(appointment.index);
  appointment.label = Hash(label);
  appointment.digest = Hash(appointment.fields);
  std::map<int64_t, std::string> keys;
  for (size_t position = 0; position < size; ++position) {
    const int64_t group = appointment.groups[position];
    if (group < 0 || group >= static_cast<int64_t>(size) || appointment.processes[position] < 0) {
      return InvalidArgument("jaxmp: groups and processes of a roll call count from 0, got group " +
                             std::to_string(group) + " and process " + std::to_string(appointment.processes[position]));
    }
    if (static_cast<size_t>(group) >= appointment.members.size()) appointment.members.resize(size_t(group) + 1);
    std::vector<int>& processes = appointment.members[static_cast<size_t>(group)].processes;
    processes.push_back(static_cast<int>(appointment.processes[position]));
    keys[group] += "," + std::to_string(appointment.devices[position]);
  }
  for (auto& [group, devices] : keys) {
    Appointment::Group& members = appointment.members[static_cast<size_t>(group)];
    std::sort(members.processes.begin(), members.processes.end());
    members.processes.erase(std::unique(members.processes.begin(), members.processes.end()), members.processes.end());
    members.key = Hash(label + ":" + devices);
  }
  return std::shared_ptr<const Appointment>(std::make_shared<Appointment>(std::move(appointment)));
}

void StartRollCall(const RollCallOptions& options) { book().Start(options); }
void LeaveRollCall(const std::string& reason) { book().Leave(reason); }
void StopRollCall() { book().Stop(); }

void Arrive(const std::shared_ptr<const Appointment>& appointment, int64_t position,
            std::function<void(const Status&)> done) {
  if (position < 0 || position >= static_cast<int64_t>(appointment->groups.size())) {
    done(InvalidArgument(appointment->call + ": the mesh has no position " + std::to_string(position)));
    return;
  }
  book().Arrive(appointment, position, std::move(done));
}

std::string RollCallFailure() { return book().failure(); }
std::string LastCall() { return book().last_call(); }
std::vector<PeerState> PeerStates() { return book().peers(); }

}  // namespace jaxmp
