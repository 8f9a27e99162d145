#include "csrc/hostmp/kernels/k_blocks.h"

#include <algorithm>

namespace jaxmp::hostmp {

std::vector<KPanel> panels_of(const Parts& parts, int64_t depth) {
  std::vector<KPanel> panels;
  for (const Product& part : parts) {
    for (int64_t k = 0, size = 0; k < part.k; k += size) {
      if (panels.empty() || panels.back().depth == depth) {
        const int64_t begin = panels.empty() ? 0 : panels.back().begin + depth;
        panels.push_back({begin, 0, {}});
      }
      KPanel& panel = panels.back();
      size = std::min(depth - panel.depth, part.k - k);
      panel.segments.push_back({&part, k, panel.depth, size});
      panel.depth += size;
    }
  }
  return panels;
}

}  // namespace jaxmp::hostmp
