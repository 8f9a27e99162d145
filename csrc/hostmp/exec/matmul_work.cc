#include "csrc/hostmp/exec/matmul_work.h"

#include <cstdint>
#include <utility>

#include "csrc/hostmp/exec/bias_grad.h"
#include "csrc/hostmp/exec/tile_task.h"
#include "csrc/hostmp/handles/handles.h"
#include "csrc/hostmp/validate/validate.h"

namespace jaxmp::hostmp {
namespace {

// The tiles of a product, and the pieces of a bias gradient that do not wait for tiles.
class MatmulWork final : public SharedWork {
 public:
  explicit MatmulWork(std::vector<const MatmulCall*> calls) {
    product_.calls = std::move(calls);
    product_.is_one_matrix = IsOneMatrix(product_.calls);
    gradient_ = MakeBiasGrad(product_);
  }

  size_t pieces() const override { return tiles().size() + (gradient_.needs_d ? 0 : gradient_.pieces()); }
  double operations() const override { return Operations(*product_.calls[0]); }

  void Run(size_t piece, int area) override {
    if (piece >= tiles().size()) return SumPiece(product_, gradient_, piece - tiles().size());
    RunTile(product_, tiles()[piece], AreaAt(area));
    SumReady(product_, gradient_, tiles()[piece]);
  }

  void Finish() override { WriteBiasGrad(product_, gradient_); }

 private:
  const std::vector<Tile>& tiles() const { return product_.tiling().tiles; }

  char* AreaAt(int index) const {
    const int64_t bytes = product_.area().bytes();
    if (bytes == 0) return nullptr;
    const auto nranks = static_cast<int>(product_.calls.size());
    const auto workspace = reinterpret_cast<uintptr_t>(product_.calls[static_cast<size_t>(index % nranks)]->workspace);
    const uintptr_t aligned = (workspace + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<char*>(aligned) + index / nranks * bytes;
  }

  DistributedProduct product_;
  BiasGrad gradient_;
};

}  // namespace

StatusOr<std::unique_ptr<SharedWork>> MatmulRank::Share(const std::vector<const RankCall*>& ranks) const {
  std::vector<const MatmulCall*> calls;
  for (const RankCall* rank : ranks) calls.push_back(&static_cast<const MatmulRank*>(rank)->call);
  if (calls.size() > 1) JAXMP_RETURN_IF_ERROR(CheckAgreement(calls));
  return std::unique_ptr<SharedWork>(std::make_unique<MatmulWork>(std::move(calls)));
}

}  // namespace jaxmp::hostmp
