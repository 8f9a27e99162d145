// A proxy between this process and JAX's coordination service.
//
// JAX's client ends its process (abort) as soon as the connection to the service breaks, which is when process 0 dies:
// no exception, no name. Behind a proxy the connection stays open, and the process barrier says who is missing.
#pragma once

#include <string>

#include "csrc/base/status.h"

namespace jaxmp {

// Listens on a free port of 127.0.0.1 and carries the bytes of each connection that this process makes to it to and
// from host:port, for as long as the process lives; others' are closed. The port.
StatusOr<int> StartCoordinatorProxy(const std::string& host, const std::string& port);

// Seconds since the service closed a connection that JAX's client still had open, so since it ended; -1 while it has
// not.
double ServiceLostFor();

}  // namespace jaxmp
