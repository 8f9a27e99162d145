// The communicator of a mesh's groups on CUDA devices.
#ifndef JAXMP_CUDA_COMMUNICATOR_H_
#define JAXMP_CUDA_COMMUNICATOR_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cuda/rank_context.h"
#include "csrc/plan/communicator.h"

namespace jaxmp::cuda {

// A seat is a rank of a group; where groups have one rank, it is a device of this process.
class CudaCommunicator final : public Communicator {
 public:
  // Use GetCudaCommunicator().
  CudaCommunicator(const Axes& axes, const std::vector<int64_t>& devices);

  int nseats() const override { return static_cast<int>(members_.size()); }
  bool is_made_at_once() const override { return false; }
  StatusOr<std::shared_ptr<abi::cublasMpGrid>> Grid(const MpApi& api, int seat, const GridShape& shape) const override;
  StatusOr<std::shared_ptr<abi::cublasMpHandle>> Handle(const MpApi& api, int seat,
                                                        abi::cudaStream_t stream) const override;
  StatusOr<size_t> Agree(int seat, StatusOr<size_t> bytes, abi::cudaStream_t stream) const override;
  StatusOr<std::shared_ptr<void>> Workspace(const MpApi& api, int seat, const GridShape& shape, size_t bytes,
                                            bool is_registered, std::shared_ptr<void> last) const override;

  // The seat of the device with this ordinal at this position.
  StatusOr<int> SeatOf(int64_t position, int ordinal) const;
  Member& member(int seat) const { return *members_[static_cast<size_t>(seat)]; }

 private:
  std::vector<std::unique_ptr<Member>> members_;  // by seat
};

// A call on a seat, from its first collective step to the last that it puts on the stream.
class Turn {
 public:
  explicit Turn(Member& member) : lock_(member.turn()), member_(member) {}
  ~Turn() { member_.Leave(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const std::unique_lock<std::mutex> lock_;
  Member& member_;
};

// The communicator of these axes on these devices (global ids by position; empty where they are not known): one for the
// life of the process. Needs the libraries.
std::shared_ptr<const CudaCommunicator> GetCudaCommunicator(const Axes& axes, const std::vector<int64_t>& devices);

}  // namespace jaxmp::cuda

#endif  // JAXMP_CUDA_COMMUNICATOR_H_
