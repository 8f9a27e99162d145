// The process barrier against a peer that the test plays.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>

#include "csrc/barrier/coordinator_proxy.h"
#include "csrc/base/float_state.h"
#include "tests/cpp/peer.h"

namespace jaxmp {
namespace {

using namespace tests;  // NOLINT: the peer

std::shared_ptr<const CallSignature> Make(const std::string& program, int64_t index, const std::string& fields,
                                          bool is_sequential = true) {
  CallSignature signature;
  signature.program = program;
  signature.index = index;
  signature.call = "matmul at train.py:" + std::to_string(41 + index);
  signature.fields = fields;
  signature.devices = {0, 1};
  signature.processes = {0, 1};
  signature.groups = {0, 0};
  signature.is_sequential = is_sequential;
  return *Prepare(signature);
}

void Arrive(const std::shared_ptr<const CallSignature>& signature, int64_t position,
            std::function<void(const Status&)> done, int64_t run = 0) {
  ArriveWithToken(signature, {nullptr, run}, position, 0,
                  [done = std::move(done)](const Status& status, const std::vector<uint64_t>&) { done(status); });
}

std::future<std::string> Come(const std::shared_ptr<const CallSignature>& signature, int64_t run = 0) {
  auto promise = std::make_shared<std::promise<std::string>>();
  Arrive(signature, 0, [promise](const Status& status) { promise->set_value(status.message()); }, run);
  return promise->get_future();
}

double Seconds(const std::function<void()>& run) {
  const auto begun = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

void Pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

bool IsReady(const std::future<std::string>& outcome) {
  return outcome.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

TEST(WhoeverComesLastFreesBoth) {
  Peer peer;
  const auto call = Make("jit_f", 0, "k=4");
  for (uint64_t count = 1; count <= 50; ++count) {
    if (count % 2) peer.Come(*call, count);  // first or last
    auto outcome = Come(call);
    CHECK_EQ(peer.Next().count, count);
    if (count % 2 == 0) {
      CHECK(!IsReady(outcome));
      peer.Come(*call, count);
    }
    CHECK_EQ(outcome.get(), "");
  }
  CHECK_EQ(BarrierFailure(), "");
}

TEST(IndependentCallsMayComeInAnyOrder) {
  Peer peer;
  const auto one = Make("jit_f", 0, "k=4"), two = Make("jit_f", 1, "k=8"), theirs = Make("jit_g", 1, "k=8");
  for (const auto& call : {one, two}) ExpectCall(*call);
  auto first = Come(one), second = Come(two);
  peer.Come(*theirs, 1);
  CHECK_EQ(second.get(), "");
  peer.Come(*theirs, 2);
  Pause(700);  // waiting at another call of one program is no crossing
  CHECK(!IsReady(first));
  peer.Come(*one, 1);
  CHECK_EQ(first.get(), "");
}

// Rank 1's run 1 has ended before the call. Its run 2 meets nothing of run 1 here; only run 2 meets it.
TEST(ARunThatARankHasLeftIsGivenUp) {
  for (const bool is_at_this_call : {true, false}) {
    Peer peer;
    const auto call = Make("jit_f", 0, "k=4"), other = Make("jit_f", 1, "k=8");
    for (const auto& each : {call, other}) ExpectCall(*each);
    auto left = Come(call, 1);
    const auto& theirs = is_at_this_call ? call : other;
    peer.Come(*theirs, 1, {}, 2);
    CHECK_EQ(left.get(),
             "jaxmp.DistributedError: matmul at train.py:41: rank 1 has come to run 2 of the program and not to this "
             "call in run 1, in which rank 0 waits");
    CHECK_EQ(Come(theirs, 2).get(), "");
    CHECK_EQ(BarrierFailure(), "");  // the job goes on
  }
}

// The numbers of two programs may be close to each other.
TEST(AnotherProgramIsNoLaterRun) {
  Peer peer;
  const auto call = Make("jit_f", 0, "k=4"), other = Make("jit_g", 1, "k=8");
  auto meets = Come(other, 20'000);
  peer.Come(*other, 1, {}, 20'000);
  CHECK_EQ(meets.get(), "");
  auto waits = Come(call, 1);
  Pause(300);
  CHECK(!IsReady(waits));
  peer.Come(*call, 1, {}, 1);
  CHECK_EQ(waits.get(), "");
}

// A process is in several runs with several devices: the next run of one device says nothing of another device.
TEST(AnotherDeviceMayBeARunAhead) {
  Peer peer;
  const auto call = Make("jit_f", 0, "k=4", /*is_sequential=*/false), other = Make("jit_f", 1, "k=8", false);
  for (const auto& each : {call, other}) ExpectCall(*each);
  auto waits = Come(call, 1);
  peer.Come(*other, 1, /*tokens=*/{2, 0}, 2);
  Pause(300);
  CHECK(!IsReady(waits));
  peer.Come(*call, 1, {}, 1);
  CHECK_EQ(waits.get(), "");
}

// Two threads of one process: the later run comes first, and each meets its own.
TEST(OverlappingRunsAreToldApart) {
  Peer peer;
  CallSignature signature = *Make("jit_f", 0, "k=4");
  signature.has_tokens = true;
  const auto call = std::make_shared<const CallSignature>(signature);
  std::vector<std::future<uint64_t>> got;
  for (int64_t run = 2; run >= 1; --run) {
    auto promise = std::make_shared<std::promise<uint64_t>>();
    got.push_back(promise->get_future());
    ArriveWithToken(call, {&signature, run}, 0, 0, [promise](const Status&, const std::vector<uint64_t>& tokens) {
      promise->set_value(tokens.size() == 2 ? tokens[1] : 0);
    });
  }
  for (uint64_t run = 1; run <= 2; ++run) peer.Come(*call, 1, {1, 100 + run}, run);
  CHECK_EQ(got[0].get(), uint64_t{102});
  CHECK_EQ(got[1].get(), uint64_t{101});
}

// A call that fails ends its run at all the other calls, also of a peer that comes to one later.
TEST(OneFailureEndsTheWholeRun) {
  Peer peer;
  const auto one = Make("jit_f", 0, "k=4"), other = Make("jit_f", 1, "k=8");
  for (const auto& each : {one, other}) ExpectCall(*each);
  auto waits = Come(other, 3);
  Message failure;
  failure.kind = Kind::kAbandon;
  failure.run = 3;
  failure.text = "matmul at train.py:41: rank 1 has left the run";
  peer.Send(failure);
  CHECK_CONTAINS(waits.get(), "rank 1 has left the run");
  CHECK_CONTAINS(Come(one, 3).get(), "rank 1 has left the run");
  peer.Come(*one, 1, {}, 4);
  CHECK_EQ(Come(one, 4).get(), "");
}

TEST(DifferentFieldsAreNamed) {
  Peer peer;
  peer.Come(*Make("jit_f", 0, "m=1\nk=4095"), 1);
  CHECK_EQ(Come(Make("jit_f", 0, "m=1\nk=4096")).get(),
           "jaxmp.DistributedError: matmul at train.py:41: rank 1 has k=4095, rank 0 has k=4096");
  CHECK(peer.Next().kind == Kind::kFirst);
  CHECK(peer.Next().kind == Kind::kFailure);
}

// A decorator without functools.wraps, or an eager call, on one rank.
TEST(EqualCallsMeetUnderDifferentNames) {
  Peer peer;
  constexpr uint64_t kTheirs = 1'000'000;
  for (uint64_t run = 7; run <= 9; ++run) {
    peer.Come(*Make("jit_wrapper", 0, "k=4"), 1, {}, kTheirs + run);
    CHECK_EQ(Come(Make("jit_f", 0, "k=4"), static_cast<int64_t>(run)).get(), "");
  }
  CHECK(IsOneRun(9, 1, kTheirs + 9));
  CHECK(!IsOneRun(9, 1, kTheirs + 8));
  peer.Come(*Make("jit_wrapper", 0, "k=4"), 1, {}, kTheirs + 11);
  CHECK_CONTAINS(Come(Make("jit_f", 0, "k=4"), 10).get(), "rank 1 has come to run 5 of the program");
  peer.Come(*Make("jit_g", 5, "k=8"), 1);  // after other calls, which this process does not have
  CHECK_EQ(Come(Make("jit_f", 0, "k=8")).get(), "");
}

// Two towers, which the ranks call in different orders: they would exchange operands.
TEST(EqualProgramsInAnotherOrderAreNamed) {
  Peer peer;
  const auto one = Make("jit_one", 0, "k=4"), other = Make("jit_other", 1, "k=4");
  for (const auto& call : {one, other}) ExpectCall(*call);
  peer.Come(*other, 1, {}, 1'000'000);
  CHECK_CONTAINS(Come(one).get(),
                 "the ranks run their programs in different orders: rank 1 waits in matmul at train.py:42, rank 0 in "
                 "matmul at train.py:41, and rank 0 has both programs; all ranks must call them in one order");
}

// One function compiled for two shapes, or two functions of one name.
TEST(ProgramsInAnotherOrderAreNoOthers) {
  const auto one = Make("jit_f", 0, "k=4");
  for (const auto& other : {Make("jit_f", 0, "k=8"), Make("jit_g", 5, "k=8")}) {
    Peer peer;
    for (const auto& call : {one, other}) ExpectCall(*call);
    peer.Come(*other, 1);
    const std::string message = Come(one).get();
    CHECK_CONTAINS(message, "rank 1 has k=8, rank 0 has k=4");
    CHECK_CONTAINS(message, ", and rank 0 has both programs; all ranks must call them in one order");
    CHECK(message.find("different programs") == std::string::npos);
  }
}

TEST(OtherProgramsThatWaitForEachOtherAreNamed) {
  for (const bool is_sequential : {true, false}) {  // with several devices, at the deadline
    Peer peer;
    peer.Come(*Make("jit_g", 5, "k=4\nm=1"), 1);
    CHECK_EQ(
        Come(Make("jit_f", 0, "k=8\nn=2", is_sequential)).get(),
        "jaxmp.DistributedError: matmul at train.py:41: the ranks run different programs, or their programs in "
        "different orders: rank 1 waits in matmul at train.py:46, rank 0 in matmul at train.py:41; rank 1 has k=4, "
        "rank 0 has k=8");
  }
}

TEST(AMissingRankIsNamedAtTheDeadline) {
  Peer peer;
  std::string message;
  const double waited = Seconds([&] { message = Come(Make("jit_f", 0, "k=4")).get(); });
  CHECK_CONTAINS(message, "matmul at train.py:41: rank 1 has not come");
  CHECK(waited >= kTimeout);
  CHECK(waited < kTimeout + 2);
  CHECK_CONTAINS(BarrierFailure(), "rank 1 has not come");
}

TEST(ARankThatEndsIsNamedAtOnce) {
  for (const bool says_so : {false, true}) {
    Peer peer;
    auto outcome = Come(Make("jit_f", 0, "k=4"));
    if (says_so) peer.Send({Kind::kGoodbye, 0, 0, 0, 0, 0, {}, "it raised ValueError: bad luck", {}, {}});
    peer.Close();
    CHECK_CONTAINS(outcome.get(), says_so ? "rank 1 has ended: it raised ValueError: bad luck" : "without a word");
    CHECK_EQ(PeerStates()[0].is_clean, false);
  }
}

// A rank may wait for the others' ends while one of them comes to its first call with it.
TEST(WhoConnectsLaterHearsOfTheEnd) {
  StartBarrier({0, 3, kTimeout});
  LeaveBarrier("it raised ValueError");
  const auto [ours, theirs] = SocketPair();
  ConnectPeer(1, ours);
  Message message;
  std::string bytes(4096, '\0');
  const ssize_t got = recv(theirs, bytes.data(), bytes.size(), MSG_DONTWAIT);
  CHECK(got > 0);
  bytes.resize(got > 0 ? static_cast<size_t>(got) : 0);
  CHECK(Decode(&bytes, &message) == barrier::Decoded::kMessage);
  CHECK_EQ(message.text, "it raised ValueError");
  StopBarrier();
  close(theirs);
}

// At the end of a program all leave and wait for the others: a failure that one of them sees is the reason for all.
TEST(ALaterReasonReplacesAGoodEnd) {
  Peer peer;
  for (const char* text : {"", "rank 2 has ended without a word"})
    peer.Send({Kind::kGoodbye, 0, 0, 0, 0, 0, {}, text, {}, {}});
  auto outcome = Come(Make("jit_f", 0, "k=4"));
  CHECK_CONTAINS(outcome.get(), "rank 1 has ended");
  for (int i = 0; i < 200 && PeerStates()[0].is_clean; ++i) Pause(5);
  CHECK_EQ(PeerStates()[0].gone, "has ended: rank 2 has ended without a word");
}

TEST(WhatAPeerGivesUpIsGivenUpHere) {
  Peer peer;
  const auto call = Make("jit_f", 0, "k=4");
  peer.Send({Kind::kFailure, 0, 0, 0, 0, 0, {}, "matmul at train.py:41: rank 2 has not come", {}, {}});
  peer.Come(*call, 1);
  Pause(100);
  CHECK_CONTAINS(Come(call).get(), "rank 2 has not come");
}

TEST(TheEndFreesThoseWhoWait) {
  std::future<std::string> outcome;
  {
    Peer peer;
    outcome = Come(Make("jit_f", 0, "k=4"));
  }
  CHECK_CONTAINS(outcome.get(), "shut down");
  CHECK_CONTAINS(Come(Make("jit_f", 0, "k=4")).get(), "shut down");
}

// Waiting ranks and the last rank resume in the state of XLA's threads, which take subnormal numbers as zero.
TEST(AProgramResumesInTheStateInWhichItCame) {
  struct Resumed {
    FloatState state;
    std::thread::id thread;
  };
  const FloatState keeping = FloatState::Current();
  Peer peer;
  const auto call = Make("jit_f", 0, "k=4"), missing = Make("jit_f", 1, "k=4");
  const auto come = [](const std::shared_ptr<const CallSignature>& signature, const FloatState& state) {
    auto promise = std::make_shared<std::promise<Resumed>>();
    const ScopedFloatState scope(state);
    Arrive(signature, 0,
           [promise](const Status&) { promise->set_value({FloatState::Current(), std::this_thread::get_id()}); });
    return promise->get_future();
  };
  for (uint64_t count = 1; count <= 8; ++count) {
    const FloatState state = count & 2 ? keeping.Flushing() : keeping;
    const bool is_last = count & 1;
    if (is_last) peer.Come(*call, count);
    if (is_last) Pause(50);
    auto resumed = come(call, state);
    if (!is_last) peer.Come(*call, count);
    const Resumed found = resumed.get();
    CHECK(found.state == state);
    CHECK_EQ(found.thread == std::this_thread::get_id(), is_last);
  }
  CHECK(come(missing, keeping.Flushing()).get().state == keeping.Flushing());  // at the deadline
  CHECK(FloatState::Current() == keeping);
}

// Both ranks meet at a first call.
void Meet(Peer& peer) {
  const auto first = Make("jit_first", 0, "k=2");
  ExpectCall(*first);
  peer.Come(*first, 1);
  CHECK(ArriveForAMoment(first, {}, 0).ok());
}

// Before a collective of XLA's: the outcome is what is known after a moment.
TEST(AMomentIsEnoughForWhoComesAtOneTime) {
  Peer peer;
  const auto call = Make("jit_f", 0, "k=4");
  peer.Come(*call, 1);
  CHECK(ArriveForAMoment(call, {}, 0).ok());
  peer.Come(*Make("jit_f", 0, "k=5"), 1);
  Pause(100);
  CHECK_CONTAINS(ArriveForAMoment(call, {}, 0).message(), "rank 1 has k=5, rank 0 has k=4");
  CHECK_EQ(LateFailure(), "");
}

TEST(WhoComesLateIsWaitedForInTheCollective) {
  Peer peer;
  const auto call = Make("jit_first", 1, "k=4");
  ExpectCall(*call);
  CHECK(Seconds([&] { CHECK(ArriveForAMoment(call, {}, 0).ok()); }) >= kTimeout / 2);
  Meet(peer);
  for (uint64_t count = 1; count <= 2; ++count) {
    CHECK(Seconds([&] { CHECK(ArriveForAMoment(call, {}, 0).ok()); }) < kTimeout / 2);
  }
  for (uint64_t count = 1; count <= 3; ++count) peer.Come(*call, count);
  Pause(100);
  CHECK_EQ(LateFailure(), "");
}

// XLA's collectives do not distinguish runs: a rank that is one run further waits until the other one comes or ends.
TEST(ARankThatIsARunAheadEntersNoCollective) {
  Peer peer;
  const auto call = Make("jit_first", 1, "k=4");
  ExpectCall(*call);
  Meet(peer);
  peer.Come(*call, 1, {}, 1);
  Pause(100);
  auto ahead = std::async(std::launch::async, [&call] { return ArriveForAMoment(call, {nullptr, 2}, 0).message(); });
  Pause(500);
  CHECK(!IsReady(ahead));
  peer.Come(*call, 1, {}, 2);
  CHECK_EQ(ahead.get(), "");
  // and the rank that is late gives its run up
  peer.Come(*call, 1, {}, 4);
  CHECK_CONTAINS(ArriveForAMoment(call, {nullptr, 3}, 0).message(), "rank 1 has come to run 3 of the program");
  CHECK_EQ(LateFailure(), "");
}

// The failure is too late for the collective, so the calls that follow report it.
TEST(ALateFailureFailsEveryFurtherCall) {
  const auto call = Make("jit_f", 0, "k=4"), next = Make("jit_f", 1, "k=8");
  for (const bool has_ended : {false, true}) {
    Peer peer;
    Meet(peer);
    CHECK(ArriveForAMoment(call, {}, 0).ok());
    has_ended ? peer.Close() : peer.Come(*Make("jit_f", 0, "k=5"), 1);
    for (int i = 0; i < 200 && LateFailure().empty(); ++i) Pause(5);
    const std::string want = has_ended ? "rank 1 has ended without a word" : "rank 1 has k=5, rank 0 has k=4";
    CHECK_CONTAINS(LateFailure(), want);
    CHECK_CONTAINS(ArriveForAMoment(next, {}, 0).message(), want);
    CHECK_CONTAINS(Come(next).get(), want);
  }
}

// Another program must not meet this one in its collective; the end of a job without errors is no failure.
TEST(AMomentIsLongerBesideAnotherProgram) {
  Peer peer;
  peer.Come(*Make("jit_g", 5, "k=4"), 1);
  Pause(100);
  CHECK_CONTAINS(ArriveForAMoment(Make("jit_f", 0, "k=8"), {}, 0).message(), "the ranks run different programs");
  // With several devices a process may be in two programs.
  const auto several = Make("jit_h", 0, "k=8", /*is_sequential=*/false);
  CHECK(ArriveForAMoment(several, {nullptr, 1'000'000}, 0).ok());
  StopBarrier();
  CHECK_EQ(LateFailure(), "");
}

// Two processes of two devices each may run one program on the first device of each, and again on the second.
TEST(GroupsOfOtherDevicesHaveOtherKeys) {
  auto key_on = [](std::vector<int64_t> devices) {
    CallSignature signature = *Make("jit_f", 0, "");
    signature.members.clear();
    signature.devices = std::move(devices);
    return (*Prepare(std::move(signature)))->members[0].key;
  };
  CHECK(key_on({0, 2}) == key_on({0, 2}));
  CHECK(key_on({0, 2}) != key_on({1, 3}));
}

TEST(APlaceOutsideTheMeshIsRefused) {
  std::string message;
  Arrive(Make("jit_f", 0, ""), 7, [&message](const Status& status) { message = status.message(); });
  CHECK_CONTAINS(message, "the mesh has no position 7");
  CallSignature short_of_groups;
  short_of_groups.devices = short_of_groups.processes = {0, 1};
  CHECK_CONTAINS(Prepare(short_of_groups).status().message(), "got 2, 2 and 0");
}

// A process without a connection is asked for once, and later gets the messages that were sent to it before.
TEST(AProcessIsConnectedWhenItIsNeeded) {
  StartBarrier({0, 3, kTimeout});
  const auto call = Make("jit_f", 0, "k=4");
  auto outcome = Come(call);
  CHECK(WantedProcesses() == std::vector<int>{1});
  WantProcesses({0, 1, 2, 3, -1});
  CHECK(WantedProcesses() == std::vector<int>{2});
  const auto [ours, theirs] = SocketPair();
  ConnectPeer(1, ours);
  Message message;
  std::string bytes(4096, '\0');
  bytes.resize(static_cast<size_t>(read(theirs, bytes.data(), bytes.size())));
  CHECK(Decode(&bytes, &message) == barrier::Decoded::kMessage);
  CHECK_EQ(message.count, uint64_t{1});
  message.text = call->call + "\n" + call->fields;
  message.ranks[0] = 1;  // the place of process 1 among the two
  bytes = Encode(message);
  CHECK_EQ(write(theirs, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  CHECK_EQ(outcome.get(), "");
  StopBarrier();
  CHECK(WantedProcesses().empty());
  close(theirs);
}

TEST(AProcessThatCannotBeConnectedIsNamedAtOnce) {
  StartBarrier({0, 2, kTimeout});
  auto outcome = Come(Make("jit_f", 0, "k=4"));
  LosePeer(1, "has ended: nothing listens at 127.0.0.1:9 any more");
  CHECK_CONTAINS(outcome.get(), "rank 1 has ended: nothing listens");
  StopBarrier();
}

// A second connection to the same process is closed, and so is a connection of a process outside of the job.
TEST(AConnectionOfNoUseIsClosed) {
  Peer peer;
  for (int process : {0, 1, 2, -1}) {
    const auto [ours, theirs] = SocketPair();
    ConnectPeer(process, ours);
    char byte;
    CHECK_EQ(read(theirs, &byte, 1), 0);
    close(theirs);
  }
  auto outcome = Come(Make("jit_f", 0, "k=4"));
  peer.Come(*Make("jit_f", 0, "k=4"), 1);
  CHECK_EQ(outcome.get(), "");
}

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

// Strangers come and go at the proxy, some of them silent; the service is there, and then it is not.
TEST(TheProxyKeepsNoDescriptorOfAStranger) {
  const int service = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  CHECK_EQ(bind(service, reinterpret_cast<sockaddr*>(&address), size), 0);
  CHECK_EQ(listen(service, 64), 0);
  CHECK_EQ(getsockname(service, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const StatusOr<int> port = StartCoordinatorProxy("127.0.0.1", std::to_string(ntohs(address.sin_port)));
  CHECK(port.ok());
  const auto settle = [](int before) {
    for (int i = 0; i < 500 && OpenDescriptors() > before; ++i) {
      Pause(10);
    }
    CHECK_EQ(OpenDescriptors(), before);
  };
  const int before = OpenDescriptors();
  CHECK_EQ(ServiceLostFor(), -1);
  for (int i = 0; i < 100; ++i) {
    const int stranger = ConnectTo(*port), served = accept(service, nullptr, nullptr);
    CHECK_EQ(write(stranger, "hello", 5), 5);
    char bytes[5];
    CHECK_EQ(recv(served, bytes, 5, MSG_WAITALL), 5);
    close(i % 2 ? served : stranger);
    for (int j = 0; i % 2 && j < 3; ++j) {  // the client is not told of the service's end, even if it writes
      CHECK_EQ(write(stranger, "hello", 5), 5);
      Pause(1);
      CHECK_EQ(recv(stranger, bytes, 1, MSG_DONTWAIT), -1);
    }
    close(i % 2 ? stranger : served);
  }
  settle(before);
  // Another process is turned away, silent or not.
  const pid_t child = fork();
  if (child == 0) {
    int turned_away = 0;
    char byte;
    for (int i = 0; i < 100; ++i) {
      const int stranger = ConnectTo(*port);
      turned_away += recv(stranger, &byte, 1, 0) <= 0;
      close(stranger);
    }
    _exit(turned_away == 100 ? 0 : 1);
  }
  int status = 1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  settle(before);
  CHECK(ServiceLostFor() >= 0);
  close(service);
  for (int i = 0; i < 100; ++i) {  // the last one waits: none is accepted after the count
    const int stranger = ConnectTo(*port);
    char byte;
    if (i % 2) CHECK(recv(stranger, &byte, 1, 0) <= 0);
    close(stranger);
  }
  settle(before - 1);
}

}  // namespace
}  // namespace jaxmp
