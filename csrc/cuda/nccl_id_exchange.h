// How the ranks of a group find each other before they have a communicator: they exchange the NCCL id under a key.
#pragma once

#include <functional>
#include <string>

#include "csrc/base/status.h"
#include "csrc/cuda/abi.h"

namespace jaxmp::cuda {

// With a value: publishes it under the key and returns it. Without: waits `timeout` seconds for another rank's value.
using Exchange = std::function<StatusOr<std::string>(const std::string& key, const std::string* value, double timeout)>;

// An empty function, the default, is a table of this process: for groups with all ranks on threads of this process.
void SetExchange(Exchange exchange);

// Calls the exchange that is set.
StatusOr<std::string> CallExchange(const std::string& key, const std::string* value, double timeout);

// Seconds that a rank waits for its peers in a call; FirstTimeout(): until they have come to its first run, because
// processes compile at different speeds.
void SetTimeout(double seconds);
double Timeout();
double FirstTimeout();

// Returns the id of the communicator that this key names, the same on all of its ranks. All ranks get it or none: rank
// 0 publishes the id only after every other rank has reported under a key of its own. If a rank does not come in time,
// rank 0 publishes the error that all of them return.
StatusOr<abi::ncclUniqueId> AgreeOnId(const std::string& key, int rank, int nranks);

}  // namespace jaxmp::cuda
