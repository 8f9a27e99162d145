// The work of one thread on one tile of D.
#ifndef JAXMP_HOSTMP_TILE_H_
#define JAXMP_HOSTMP_TILE_H_

#include <vector>

#include "csrc/hostmp/objects.h"
#include "csrc/hostmp/schedule.h"

namespace jaxmp::hostmp {

// Everything a tile needs, fixed before the first one runs.
struct Product2D {
  std::vector<const Call*> calls;  // by rank
  Schedule schedule;
  Area area;
};

// `workspace` is the thread's own area.
void run_tile(const Product2D& product, const Tile& tile, char* workspace);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_TILE_H_
