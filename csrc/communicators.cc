#include "csrc/communicators.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace jaxmp {
namespace {

int64_t Extent(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& axes) {
  int64_t extent = 1;
  for (int64_t axis : axes) extent *= mesh_shape[static_cast<size_t>(axis)];
  return extent;
}

// Row-major index of the coordinates on these axes alone.
int64_t Flatten(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& coordinates,
                const std::vector<int64_t>& axes) {
  int64_t index = 0;
  for (int64_t axis : axes) {
    index = index * mesh_shape[static_cast<size_t>(axis)] + coordinates[static_cast<size_t>(axis)];
  }
  return index;
}

std::vector<int64_t> OtherAxes(const Axes& axes) {
  std::vector<int64_t> others;
  for (int64_t axis = 0; axis < static_cast<int64_t>(axes.mesh_shape.size()); ++axis) {
    const bool is_row = std::count(axes.row.begin(), axes.row.end(), axis) > 0;
    const bool is_col = std::count(axes.col.begin(), axes.col.end(), axis) > 0;
    if (!is_row && !is_col) others.push_back(axis);
  }
  return others;
}

std::vector<Place> PlacesOf(const Axes& axes) {
  const std::vector<int64_t> others = OtherAxes(axes);
  const int64_t nprow = Extent(axes.mesh_shape, axes.row);
  std::vector<int64_t> coordinates(axes.mesh_shape.size(), 0);
  std::vector<Place> places;
  for (bool is_done = false; !is_done;) {
    const int64_t prow = Flatten(axes.mesh_shape, coordinates, axes.row);
    const int64_t pcol = Flatten(axes.mesh_shape, coordinates, axes.col);
    places.push_back({static_cast<int>(prow + pcol * nprow), Flatten(axes.mesh_shape, coordinates, others)});
    is_done = true;  // unless some coordinate can still be counted up, the last axis first
    for (size_t axis = coordinates.size(); axis-- > 0 && is_done;) {
      is_done = ++coordinates[axis] == axes.mesh_shape[axis];
      if (is_done) coordinates[axis] = 0;
    }
  }
  return places;
}

}  // namespace

bool Axes::operator<(const Axes& other) const {
  return std::tie(mesh_shape, row, col) < std::tie(other.mesh_shape, other.row, other.col);
}

Communicator::Communicator(const Axes& axes)
    : nprow_(static_cast<int>(Extent(axes.mesh_shape, axes.row))),
      npcol_(static_cast<int>(Extent(axes.mesh_shape, axes.col))),
      places_(PlacesOf(axes)),
      group_(nprow_ * npcol_) {}

const Place* Communicator::Locate(int64_t position) const {
  if (position < 0 || position >= static_cast<int64_t>(places_.size())) return nullptr;
  return &places_[static_cast<size_t>(position)];
}

std::shared_ptr<const Communicator> GetCommunicator(const Axes& axes) {
  // Never destroyed: a plan of some other static may outlive this function's statics.
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<Axes, std::weak_ptr<const Communicator>>;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    if (auto found = known->find(axes); found != known->end()) {
      if (auto communicator = found->second.lock()) return communicator;
    }
  }
  auto made = std::make_shared<const Communicator>(axes);  // collective on some libraries, so never under the lock
  std::lock_guard<std::mutex> lock(*mutex);
  std::weak_ptr<const Communicator>& entry = (*known)[axes];
  if (auto first = entry.lock()) return first;
  entry = made;
  return made;
}

}  // namespace jaxmp
