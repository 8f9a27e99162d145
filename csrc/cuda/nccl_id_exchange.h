// How the ranks of a group find each other before they have a communicator: the NCCL id travels under a key.
#pragma once

#include <functional>
#include <string>

#include "csrc/base/status.h"
#include "csrc/cuda/abi.h"

namespace jaxmp::cuda {

// With a value: publishes it under the key and returns it. Without: waits, for so many seconds, for somebody's value.
using Exchange = std::function<StatusOr<std::string>(const std::string& key, const std::string* value, double timeout)>;

// An empty function, as at the start: a table of this process, for groups whose ranks are all threads of it.
void SetExchange(Exchange exchange);

// The same through whatever is set.
StatusOr<std::string> CallExchange(const std::string& key, const std::string* value, double timeout);

// Seconds that a rank waits for its peers in a call; and until they have come to its first run, for which processes
// compile at different speeds.
void SetTimeout(double seconds);
double Timeout();
double FirstTimeout();

// The id of the communicator that this key names, the same for all of its ranks. They come into it together or not at
// all: rank 0 publishes the id only after every other rank has reported under a key of its own; where one does not come
// in time, it publishes the error that all of them return.
StatusOr<abi::ncclUniqueId> AgreeOnId(const std::string& key, int rank, int nranks);

}  // namespace jaxmp::cuda
