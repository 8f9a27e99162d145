#include "csrc/cuda/communicator.h"

#include <algorithm>
#include <utility>

#include "csrc/cuda/libraries.h"

namespace jaxmp::cuda {
namespace {

std::string Join(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : "-") + std::to_string(value);
  return text;
}

int CountDevices() {
  int count = 0;
  return Loaded()->driver.DeviceGetCount(&count) == abi::CUDA_SUCCESS ? count : 0;
}

}  // namespace

CudaCommunicator::CudaCommunicator(const Axes& axes, const std::vector<int64_t>& devices) : Communicator(axes) {
  const std::string mesh = "jaxmp/nccl/mesh " + Join(axes.mesh_shape) + "/axes " + Join(axes.row) + " by " +
                           Join(axes.col) + "/devices " + Join(devices);
  const int64_t ngroups_here = nranks() == 1 ? CountDevices() : ngroups();
  for (int64_t group = 0; group < ngroups_here; ++group) {
    for (int rank = 0; rank < nranks(); ++rank) {
      rank_contexts_.push_back(
          std::make_unique<RankContext>(mesh + "/group " + std::to_string(group), group, rank, nranks()));
    }
  }
}

StatusOr<int> CudaCommunicator::LocalRankOf(int64_t position, int ordinal) const {
  JAXMP_ASSIGN_OR_RETURN(const GroupRank group_rank, Find(position));
  if (nranks() > 1) return static_cast<int>(group_rank.group) * nranks() + group_rank.rank;
  if (ordinal >= 0 && ordinal < num_local_ranks()) return ordinal;
  return Internal("jaxmp: this process has ", num_local_ranks(), " CUDA devices, but XLA runs a call on device ",
                  ordinal);
}

namespace {

struct DeviceIds {
  std::mutex mutex;
  std::map<int, int64_t> ids;  // by ordinal
};

DeviceIds& device_ids() {
  static auto* const only = new DeviceIds;
  return *only;
}

}  // namespace

void SetDeviceIds(const std::map<int, int64_t>& ids) {
  std::lock_guard<std::mutex> lock(device_ids().mutex);
  device_ids().ids = ids;
}

StatusOr<int64_t> PositionOf(const std::vector<int64_t>& devices, int ordinal) {
  std::lock_guard<std::mutex> lock(device_ids().mutex);
  const auto found = device_ids().ids.find(ordinal);
  if (found == device_ids().ids.end()) {
    return FailedPrecondition("jaxmp: the id of CUDA device ", ordinal,
                              " is not known in this process; call jaxmp.register() ahead of the program");
  }
  const auto at = std::find(devices.begin(), devices.end(), found->second);
  if (at != devices.end()) return at - devices.begin();
  return FailedPrecondition("jaxmp: the program was compiled for a mesh of the devices ", Join(devices),
                            ", but runs on device ", found->second, "; compile it for the mesh that it runs on");
}

std::shared_ptr<const CudaCommunicator> GetCudaCommunicator(const Axes& axes, const std::vector<int64_t>& devices) {
  // Never destroyed, like the objects that its members hold.
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<std::pair<Axes, std::vector<int64_t>>, std::shared_ptr<const CudaCommunicator>>;
  std::lock_guard<std::mutex> lock(*mutex);  // nothing below is collective
  std::shared_ptr<const CudaCommunicator>& found = (*known)[{axes, devices}];
  if (!found) found = std::make_shared<const CudaCommunicator>(axes, devices);
  return found;
}

}  // namespace jaxmp::cuda
