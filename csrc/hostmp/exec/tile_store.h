// Finishes a tile: adds C to its sums, applies the epilog, and stores D on each rank.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// Where a part of D is stored: the rank (the first one in an all-reduce, where all ranks have the part), and the local
// row and column.
struct TileOrigin {
  int64_t rank, row, col;
};

// A rectangle of D that is in one piece in a rank's memory, and therefore has its own C, aux and epilog inputs.
class TileStore {
 public:
  // `z` holds the sums, in the accumulator's type; it is D itself if `is_in_d`. `scratch` has ScaledGemmScratch() bytes
  // if operands are of low precision.
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

  // z = beta C, or z += beta C if `is_started`. Returns whether z has been written by now.
  bool AddC(bool is_started) const;

  // Writes z to D, together with aux, scales and maxima, on every rank that has the part.
  void Finish() const;

  // Writes the transpose of D at `to`, on every rank that has the part there.
  void Mirror(const TileOrigin& to) const;

 private:
  // The aux of the part, on one rank.
  struct Aux {
    char* data = nullptr;
    int64_t bit = 0;     // RELU: position of the first row's bit in its byte
    int64_t ld = 0;      // bytes for RELU, elements for GELU
    int64_t rows = 0;    // including the padding, in the last tile of a column
    int64_t bytes = 0;   // of `rows` in one column
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
  const MatmulCall& call_;                       // rank 0's, for everything that all ranks share
  const TileOrigin origin_;
  const int64_t rows_, cols_;
  const MatrixView z_;
  const bool is_in_d_;
  char* const scratch_;
};

}  // namespace jaxmp::hostmp
