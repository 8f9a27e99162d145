// What becomes of a tile's sums: C, the epilog, and D as each rank stores it.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// Where a part of D lies: on which rank (after an all-reduce all of them have it, and this is the first), and at which
// local row and column.
struct TileOrigin {
  int64_t rank, row, col;
};

// A rectangle of D that is in one piece in a rank's memory, and so has C, aux and the epilog's inputs of its own.
class TileStore {
 public:
  // `z` has the sums, in the accumulator's type; with `is_in_d` it is D itself. `scratch` has ScaledGemmScratch()
  // bytes where operands are of low precision.
  TileStore(const std::vector<const MatmulCall*>& calls, const TileOrigin& origin, int64_t rows, int64_t cols,
            const MatrixView& z, bool is_in_d, char* scratch)
      : calls_(calls),
        call_(*calls[0]),
        origin_(origin),
        rows_(rows),
        cols_(cols),
        z_(z),
        is_in_d_(is_in_d),
        scratch_(scratch) {}

  // z (+)= beta C; returns whether z has been written by now.
  bool AddC(bool is_started) const;

  // From z to D, with everything that comes with it, on every rank that has the part.
  void Finish() const;

 private:
  // Where the part's aux is.
  struct Aux {
    char* data = nullptr;
    int64_t bit = 0;     // of RELU: where the first row's is in its byte
    int64_t ld = 0;      // bytes for RELU, elements for GELU
    int64_t rows = 0;    // with the padding, in the last tile of a column
    int64_t bytes = 0;   // of `rows`
    int64_t stride = 0;  // bytes
  };

  const MatmulCall& CallOf(int64_t rank) const { return *calls_[static_cast<size_t>(rank)]; }
  const MatmulCall& owner() const { return CallOf(origin_.rank); }
  MatrixView DOf(int64_t rank) const { return Locate(CallOf(rank).d, origin_.row, origin_.col); }
  int64_t last_rank() const { return call_.is_all_reduce ? call_.nranks - 1 : origin_.rank; }

  void Store() const;
  void StoreLowPrecision(const Epilog* epilog) const;
  void ApplyEpilog(const Epilog* epilog, const MatrixView& to, abi::cudaDataType_t out) const;
  const void* BiasAs(abi::cudaDataType_t type) const;
  Aux AuxOf(int64_t rank) const;
  void Raise(uint32_t* MatmulCall::* most, uint32_t value) const;
  void CopyToPeers() const;
  void CopyScales(const MatmulCall& to) const;

  const std::vector<const MatmulCall*>& calls_;  // by rank
  const MatmulCall& call_;                       // rank 0's, for what all ranks share
  const TileOrigin origin_;
  const int64_t rows_, cols_;
  const MatrixView z_;
  const bool is_in_d_;
  char* const scratch_;
};

}  // namespace jaxmp::hostmp
