// Tells every process which others have come to a call.
//
// XLA's collectives across processes cannot be interrupted, and one that a peer never joins hangs. So before a
// collective every process of the group says that it has come, and goes on when all the others have: from there on all
// of them are alive and about to run the same thing. Here is that process barrier: messages over sockets that Python
// connects, a thread that reads them, a deadline, and the comparison of what the processes came for.
//
// A process is connected when it is first needed: the process barrier says which are wanted (WantedProcesses), Python
// opens a socket and has the other end prove itself, and hands the socket over (ConnectPeer). Messages wait until then.
//
// Nobody blocks for longer than a moment. A process that comes late finds the others' messages waiting; what a call has
// cost when everybody is there is one message to each of the others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/barrier/call_signature.h"
#include "csrc/base/status.h"

namespace jaxmp {

struct BarrierOptions {
  int process = 0, nprocesses = 1;
  double timeout = 60;  // seconds until a process that has not come is missing
};

// One process barrier per operating-system process. Start, Leave and Stop are called by one thread; Arrive by any.
void StartBarrier(const BarrierOptions& options);

// Asks for a connection to each of these, unless there is one or it has been asked for.
void WantProcesses(const std::vector<int>& processes);

// The processes that were asked for since the last call; waits for one. Empty once the process barrier has stopped.
std::vector<int> WantedProcesses();

// `fd` is a socket to `process`, which has proved itself; this takes ownership, even if it does not need the socket.
void ConnectPeer(int process, int fd);

// `process` cannot be connected, since it `gone`: "has ended ...".
void LosePeer(int process, const std::string& gone);

// Tells the peers that this process comes to no further call, and why: "" where all is well. With a reason this waits
// for connections that were asked for in the last second, so that those peers hear it too.
void LeaveBarrier(const std::string& reason);

// A program of this process has this call: one that waits at one call of a program may come to the others first.
void ExpectCall(const CallSignature& signature);

// Closes the sockets; calls that still wait fail.
void StopBarrier();

// The device at `position` has come to a collective of our own, with a token. `done` is called exactly once with the
// outcome: on this thread where it is known already, else on a thread of the process barrier's own on which it may
// block. It gets the tokens of the group's devices, by their places among its positions, once all of them have come.
// Tokens select data, so a signature may stand for one instruction of a program alone: it is an error if a device comes
// to it from two in one run.
void ArriveWithToken(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position,
                     uint64_t token, std::function<void(const Status&, const std::vector<uint64_t>&)> done);

// The device has come to a collective of XLA's, which waits for all by itself. This waits for the outcome first, on
// this thread and for a moment only. XLA takes a loop or branch for started once its calls have returned, so a call
// with a pending outcome would let collectives after the loop start before those inside. While a process has come
// to no call at all, or is in another run, the wait is longer: gloo opens its transport for 30 seconds only, and does
// not tell one run from another. Without an outcome the collective may begin. If the call fails later, every further
// call of this process gets the failure (LateFailure).
Status ArriveForAMoment(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position);

// Whether run `theirs` of `process` and run `own` of this process are one run of a job, as their barriers have found.
bool IsOneRun(int64_t own, int process, uint64_t theirs);

// Returns the message of the first call that failed so far, or "".
std::string BarrierFailure();

// The same of the first call that failed after its process had gone on, or "".
std::string LateFailure();

// Returns the last call of this process, or "".
std::string LastCall();

struct PeerState {
  int process;
  std::string gone;  // how it left; "" while it is there
  double gone_for;   // seconds since then
  bool is_clean;     // it left saying that all is well
  double silence;    // seconds since it was last heard; it is asked for a sign of life once a second
};
std::vector<PeerState> PeerStates();  // of those that are connected or wanted

}  // namespace jaxmp
