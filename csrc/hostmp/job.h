// One product in flight: what every rank brought, cut into tiles.
#ifndef JAXMP_HOSTMP_JOB_H_
#define JAXMP_HOSTMP_JOB_H_

#include <memory>
#include <vector>

#include "csrc/hostmp/host.h"
#include "csrc/hostmp/objects.h"
#include "csrc/status.h"

namespace jaxmp::hostmp {

// One rank at the rendezvous: its call, or why it has none.
struct Arrival {
  Stream* stream = nullptr;
  std::unique_ptr<Call> call;
  Status error;
};

// Records the arrival. The last rank's arrival runs the product, or hands every rank the error.
void arrive(Arrival arrival, int rank, int nranks);

// Runs a product all of whose ranks are here, on this thread and those that rank `self` may call for help.
void run_product(std::vector<Arrival> arrivals, int self);

// Calls every stream's done(): that of rank `self` here and last, the others (all, for self = -1) on other threads.
void complete(const std::vector<Arrival>& arrivals, int self, const Status& status);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_JOB_H_
