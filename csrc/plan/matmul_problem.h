// Everything static about one call, in cuBLASMp's column-major terms: the key of the plan cache.
// Plain data: no library, no JAX, no device.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

#include "csrc/base/status.h"

namespace jaxmp {

// The words of attributes; enums.h has their names and numbers, in the order of these lists.
enum class Pattern : uint8_t { kLocal, kAllGather, kReduceScatter, kAllReduce, kGrid };
enum class Op : uint8_t { kN, kT, kC };
enum class DType : uint8_t {
  kNone,
  kF32,
  kF64,
  kBF16,
  kF16,
  kC64,
  kC128,
  kU8,
  kE4M3,
  kE5M2,
  kE2M1,
  kS8,
  kS32,
  kS4,
  kU4,
  kE3M4,
  kE4M3Ieee,
  kE4M3B11Fnuz,
  kE4M3Fnuz,
  kE5M2Fnuz,
  kE8M0,
};
// cuBLAS's compute types: how exactly products are formed, and the type of their sums.
enum class Compute : uint8_t {
  k32F,
  k32FPedantic,
  k32FFastTF32,
  k32FFast16BF,
  k32FFast16F,
  k32FEmulated16BFX9,
  k64F,
  k64FPedantic,
  k64FEmulatedFixedPoint,
  k32I,
};
enum class Algorithm : uint8_t {
  kDefault,
  kSplitP2P,
  kSplitMulticast,
  kAtomicP2P,
  kAtomicMulticast,
  kNoOverlap,
  kFused,
};
// How a matrix is scaled; kNone is a scale of 1.
enum class ScaleMode : uint8_t { kNone, kScalar, kVec16, kVec32, kOuterVec, kVec128, kBlk128 };

// The bits of an epilog's number, as in cuBLASLt. Derivatives are of activations, bias gradients of D, A and B.
enum EpilogBit : int64_t {
  kRelu = 2,
  kBias = 4,
  kReluDerivative = 8,
  kBgradD = 16,
  kGelu = 32,
  kGeluDerivative = 64,
  kAux = 128,
  kBgradA = 256,
  kBgradB = 512,
};

struct Problem {
  Pattern pattern = Pattern::kLocal;
  int64_t m = 0, n = 0, k = 0;  // global extents of the product that one communicator computes
  Op trans_a = Op::kN, trans_b = Op::kN;
  DType dtype_a = DType::kNone, dtype_b = DType::kNone, dtype_c = DType::kNone, dtype_d = DType::kNone,
        dtype_bias = DType::kNone, dtype_aux = DType::kNone;
  Compute compute = Compute::k32F;
  std::complex<double> alpha = 1.0, beta = 0.0;
  ScaleMode scale_mode_a = ScaleMode::kNone, scale_mode_b = ScaleMode::kNone, scale_mode_c = ScaleMode::kNone,
            scale_mode_d = ScaleMode::kNone, scale_mode_aux = ScaleMode::kNone;
  ScaleMode d_out_scale_mode = ScaleMode::kNone;  // the mode of the scales that the call computes for D's blocks
  int64_t amax_d = 0, amax_aux = 0;               // 1: the largest absolute value of D, or of the aux, is an output
  int64_t epilog = 0;                             // cuBLASMp's number without the ALLREDUCE bit
  // The sizes of all mesh axes, and the indices of the axes that span a group. Ranks of a 1-D group count row-major
  // over axes_row; in a grid axes_row give the process row and axes_col the column.
  std::vector<int64_t> mesh_shape, axes_row, axes_col;
  std::string determinism;  // "run_to_run", "batch" or "topology"
  // Communication options: the type that partial sums are sent in (none: the library's choice), how communication and
  // products overlap, and how many multiprocessors communicate (0: the library's choice).
  DType communication_dtype = DType::kNone;
  Algorithm algorithm = Algorithm::kDefault;
  int64_t comm_sm_count = 0;
  // Block-cyclic A, B and D on a grid, as stored: (mb, nb, rsrc, csrc). Empty: contiguous shards.
  std::vector<int64_t> layout_a, layout_b, layout_d;
  // Global device ids by position in the mesh, if communicators depend on them and they are known.
  std::vector<int64_t> devices;

  bool has_c() const { return dtype_c != DType::kNone; }
  bool has_bias() const { return dtype_bias != DType::kNone && !has_gradient(); }
  bool has_gradient() const { return (epilog & (kBgradD | kBgradA | kBgradB)) != 0; }
  bool has_aux() const { return dtype_aux != DType::kNone; }
  bool has_relu() const { return (epilog & (kRelu | kReluDerivative)) != 0; }
  bool needs_bias() const { return (epilog & kBias) != 0 || has_gradient(); }
  bool needs_aux() const { return (epilog & kAux) != 0; }
  bool reads_aux() const { return (epilog & (kReluDerivative | kGeluDerivative)) != 0; }
  bool fixed_reduction_order() const { return determinism != "run_to_run"; }
  bool is_block_cyclic() const { return !layout_d.empty(); }
  int64_t nprow() const { return Extent(axes_row); }
  int64_t npcol() const { return Extent(axes_col); }
  int64_t nranks() const { return nprow() * npcol(); }

 private:
  int64_t Extent(const std::vector<int64_t>& axes) const {
    int64_t extent = 1;
    for (int64_t axis : axes) extent *= mesh_shape[static_cast<size_t>(axis)];
    return extent;
  }
};

// Compares values, floating-point ones by their bits: alpha = -0 and alpha = 0 give different results.
bool operator==(const Problem& x, const Problem& y);
inline bool operator!=(const Problem& x, const Problem& y) { return !(x == y); }
std::ostream& operator<<(std::ostream& os, const Problem& problem);
std::string ToString(const Problem& problem);

struct ProblemHash {
  size_t operator()(const Problem& problem) const;
};

// The attributes of the custom call as they arrive, from XLA or from a Python dictionary.
using Attribute = std::variant<int64_t, std::string, std::vector<int64_t>, std::vector<double>>;
using Attributes = std::map<std::string, Attribute>;

// Checks the attributes that say which devices of a mesh call together, as in Axes.
Status CheckMesh(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& axes_row,
                 const std::vector<int64_t>& axes_col);

// Requires every attribute by name and type, refuses unknown ones, and checks what concerns a single attribute or the
// mesh. The plan checks whether the library can compute the problem.
StatusOr<Problem> MakeProblem(const Attributes& attributes);

}  // namespace jaxmp
