#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "csrc/base/limits.h"
#include "csrc/base/status.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/handles/handles.h"
#include "csrc/hostmp/tiling/product_tiling.h"
#include "csrc/hostmp/validate/validate.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

Status CheckPresent(const Arguments& in) {
  if (!in.handle) return InvalidArgument("handle is null; make it with cublasMpCreate");
  if (!in.matmul) return InvalidArgument("matmulDesc is null; make it with cublasMpMatmulDescriptorCreate");
  if (!in.desc_a) return InvalidArgument("descA is null");
  if (!in.desc_b) return InvalidArgument("descB is null");
  if (!in.desc_d) return InvalidArgument("descD is null");
  if (in.c && !in.desc_c) return InvalidArgument("c is given but descC is null; pass the descriptor of C");
  if (!in.alpha) return InvalidArgument("alpha is null; pass a host pointer to a scalar");
  if (!in.beta) return InvalidArgument("beta is null; pass a host pointer to a scalar, which may be 0");
  return {};
}

// The most cuts and tiles of a product: a schedule of this many takes some hundred megabytes.
constexpr double kMostPieces = 1 << 24;

Status CheckExtents(const Arguments& in) {
  const std::pair<const char*, int64_t> extents[] = {{"m", in.m}, {"n", in.n}, {"k", in.k}};
  for (const auto& [name, value] : extents) {
    if (value < 0) return InvalidArgument(name, " must not be negative, got ", value);
    // The BLAS counts in 32-bit integers.
    if (value > INT_MAX) return Unimplemented(name, " must fit 32 bits, got ", value);
  }
  return {};
}

std::complex<double> ReadScalar(const void* from, cudaDataType_t type) {
  std::complex<double> scalar;
  const auto read = [&](auto value) {
    std::memcpy(&value, from, sizeof(value));
    scalar = value;
  };
  if (type == CUDA_R_32I) return read(int32_t{}), scalar;
  WithType(type, [&](auto number) { read(Computed<decltype(number)>{}); });
  return scalar;
}

Status CheckTypes(const MatmulCall& call) {
  const cudaDataType_t a = call.a.desc.type, b = call.b.desc.type, d = call.d.desc.type;
  if (call.is_mixed()) return CheckMixedTypes(call);
  if (call.is_low_precision()) return CheckLowPrecisionTypes(call);
  if (a != b) return Unimplemented("A is ", NameOf(a), " and B is ", NameOf(b), "; both must be of one type");
  const bool widens = Facts(a).is_16bit && d == CUDA_R_32F;
  if (a != d && !widens) {
    return Unimplemented("A and B are ", NameOf(a), " and D is ", NameOf(d), "; D must be ", NameOf(a),
                         Facts(a).is_16bit ? " or f32" : "");
  }
  const bool is_double = a == CUDA_R_64F || a == CUDA_C_64F;
  const bool is_64f = call.compute == CUBLAS_COMPUTE_64F || call.compute == CUBLAS_COMPUTE_64F_PEDANTIC ||
                      call.compute == CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT;
  const bool is_32f = call.compute == CUBLAS_COMPUTE_32F || call.compute == CUBLAS_COMPUTE_32F_PEDANTIC;
  // Compute types that may round or emulate are computed in f32, which is at least as exact.
  const bool may_round = call.compute == CUBLAS_COMPUTE_32F_FAST_TF32 || call.compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
                         call.compute == CUBLAS_COMPUTE_32F_FAST_16F ||
                         call.compute == CUBLAS_COMPUTE_32F_EMULATED_16BFX9;
  if (is_double ? is_64f : is_32f || (may_round && !Facts(a).is_16bit)) return {};
  return Unimplemented("the compute type is ", static_cast<int>(call.compute), " but A is ", NameOf(a),
                       ", which takes CUBLAS_COMPUTE_", is_double ? "64F" : "32F");
}

struct Side {
  const char* name;
  const Operand* operand;
  int64_t rows, cols;  // of the submatrix, as stored
};

Status CheckSubmatrix(const Side& side) {
  const Operand& x = *side.operand;
  struct Along {
    const char* index;
    const char* block;
    int64_t offset, size;
    const Axis& axis;
  };
  for (const Along& along :
       {Along{"row", "mb", x.row, side.rows, x.desc.rows}, Along{"column", "nb", x.col, side.cols, x.desc.cols}}) {
    if (along.offset < 0 || along.offset % along.axis.block != 0) {
      return InvalidArgument("sub(", side.name, ") starts at ", along.index, " ", along.offset + 1,
                             "; indices count from 1 and must stand at a block of ", along.block, side.name, "=",
                             along.axis.block);
    }
    if (along.offset > along.axis.extent || along.size > along.axis.extent - along.offset) {
      return InvalidArgument("sub(", side.name, ") needs ", along.size, " ", along.index, "s from ", along.offset + 1,
                             ", but ", side.name, " has ", along.axis.extent);
    }
  }
  return {};
}

Status CheckGrids(const MatmulCall& call) {
  const cublasMpGrid& grid = call.grid();
  const std::pair<const char*, const Operand*> others[] = {{"A", &call.a}, {"B", &call.b}};
  for (const auto& [name, operand] : others) {
    const ncclComm& comm = operand->desc.grid.comm;
    if (comm.group == grid.comm.group && comm.rank == grid.comm.rank) continue;
    return InvalidArgument("the grid of ", name, " belongs to another communicator (rank ", comm.rank, " of ",
                           comm.nranks, ") than that of D (rank ", grid.comm.rank, " of ", grid.comm.nranks,
                           "); make all grids from one communicator");
  }
  return {};
}

// True for contiguous shards on one grid of unequal sides (capability grid_any_shape). A and B then cut k into
// different numbers of blocks, so that no choice of blocks keeps cuBLASMp's rule.
bool IsUnevenGrid(const MatmulCall& call) {
  const cublasMpGrid& grid = call.grid();
  if (grid.nprow == grid.npcol) return false;
  for (const Operand* operand : {&call.a, &call.b, &call.d}) {
    const cublasMpMatrixDescriptor& desc = operand->desc;
    if (desc.grid.nprow != grid.nprow || desc.grid.layout != grid.layout) return false;
    for (const Axis& axis : {desc.rows, desc.cols}) {
      if (axis.block * axis.nprocs < axis.extent) return false;
    }
  }
  return true;
}

// Checks cuBLASMp's rule that the blocks of op(A), op(B) and D fit each other.
Status CheckBlocks(const MatmulCall& call) {
  if (IsUnevenGrid(call)) return {};
  const bool is_a_plain = call.is_a_plain(), is_b_plain = call.is_b_plain();
  struct Rule {
    const char *one, *other;
    const Axis &x, &y;
  };
  const Rule rules[] = {{is_a_plain ? "nbA" : "mbA", is_b_plain ? "mbB" : "nbB", call.a_k(), call.b_k()},
                        {is_a_plain ? "mbA" : "nbA", "mbD", call.a_m(), call.d.desc.rows},
                        {is_b_plain ? "nbB" : "mbB", "nbD", call.b_n(), call.d.desc.cols}};
  for (const Rule& rule : rules) {
    if (rule.x.block == rule.y.block) continue;
    return InvalidArgument("blocks do not fit: ", rule.one, "=", rule.x.block, " but ", rule.other, "=", rule.y.block,
                           "; with op(A)=", is_a_plain ? "N" : "T", " and op(B)=", is_b_plain ? "N" : "T",
                           " they must be equal");
  }
  return {};
}

// C is read where D is written, so both must have the same layout.
Status CheckC(const MatmulCall& call, bool is_given) {
  if (!is_given) {
    if (call.beta == 0.0) return {};
    return InvalidArgument("c is null but beta is ", call.beta.real(), "; pass C, or beta = 0");
  }
  const cublasMpMatrixDescriptor &c = call.c.desc, &d = call.d.desc;
  if (call.stores_low_precision()) {
    JAXMP_RETURN_IF_ERROR(CheckLowPrecisionC(c.type));
  } else if (c.type != d.type) {
    return Unimplemented("C is ", NameOf(c.type), " and D is ", NameOf(d.type), "; they must be of one type");
  }
  if (c.rows.block != d.rows.block || c.cols.block != d.cols.block) {
    return InvalidArgument("C has blocks of ", c.rows.block, "x", c.cols.block, " and D of ", d.rows.block, "x",
                           d.cols.block, "; they must be equal");
  }
  const auto same = [](const Axis& x, const Axis& y) {
    return x.extent == y.extent && x.nprocs == y.nprocs && x.source == y.source;
  };
  const bool is_alike = same(c.rows, d.rows) && same(c.cols, d.cols) && c.grid.layout == d.grid.layout &&
                        c.grid.comm.group == d.grid.comm.group && call.c.row == call.d.row && call.c.col == call.d.col;
  if (is_alike) return {};
  return InvalidArgument("C is distributed otherwise than D; give both the same extents, grid, source and first index");
}

Status CheckAllReduce(const MatmulCall& call) {
  if (!call.is_all_reduce) return {};
  const cublasMpMatrixDescriptor& d = call.d.desc;
  if (d.grid.nprow != 1 || d.rows.extent != call.m || d.cols.extent != call.n * call.nranks ||
      (call.n > 0 && d.cols.block != call.n) || call.d.row != 0 || call.d.col != 0) {
    return InvalidArgument("ALLREDUCE needs D as ", call.m, "x", call.n * call.nranks, " in blocks of ", call.m, "x",
                           call.n, " on a 1x", call.nranks, " grid, a whole product on each rank; got ", d.rows.extent,
                           "x", d.cols.extent, " in blocks of ", d.rows.block, "x", d.cols.block, " on a ",
                           d.grid.nprow, "x", d.grid.npcol, " grid");
  }
  if (call.a_m().nprocs == 1 && call.b_n().nprocs == 1) return {};
  return InvalidArgument("ALLREDUCE sums over k: A and B must be distributed along k alone");
}

// Checks the size of a column of partial sums, in the type that is communicated.
Status CheckFusedRows(const MatmulCall& call) {
  const auto type = call.communication_type == -1 ? call.accumulator() : cudaDataType_t(call.communication_type);
  const int64_t bytes = call.d.local_rows() * Facts(type).bytes;
  if (bytes % 16 == 0) return {};
  return Unimplemented("algorithm 6 (FUSED) needs the local rows of D to be a multiple of 16 bytes, got ",
                       call.d.local_rows(), " rows of ", NameOf(type));
}

// Checks the further requirements of an explicit overlap algorithm. DEFAULT falls back if they do not hold.
Status CheckAlgorithm(const MatmulCall& call) {
  if (call.algo == CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT || call.algo == CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP) return {};
  const std::string algo = StrCat("algorithm ", static_cast<int>(call.algo));
  if (call.algo < 0 || call.algo > CUBLASMP_MATMUL_ALGO_TYPE_FUSED) return InvalidArgument(algo, " does not exist");
  if (call.algo == CUBLASMP_MATMUL_ALGO_TYPE_FUSED && !call.is_all_reduce) {
    return Unimplemented(algo, " (FUSED) all-reduces; set the ALLREDUCE epilog, or use DEFAULT");
  }
  if (call.algo == CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST && !call.sums_over_ranks()) {
    return Unimplemented(algo, " (SPLIT_MULTICAST) sums over ranks; A and B must be distributed along k alone");
  }
  if (call.algo == CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST && (call.is_all_reduce || !call.sums_over_ranks())) {
    return Unimplemented(algo, " (ATOMIC_MULTICAST) reduces and scatters; take SPLIT_MULTICAST, or DEFAULT");
  }
  if (call.algo == CUBLASMP_MATMUL_ALGO_TYPE_FUSED) JAXMP_RETURN_IF_ERROR(CheckFusedRows(call));
  const std::pair<const char*, const Operand*> sides[] = {{"A", &call.a}, {"B", &call.b}, {"D", &call.d}};
  for (const auto& [name, operand] : sides) {
    for (const Axis& axis : {operand->desc.rows, operand->desc.cols}) {
      if (axis.nprocs == 1) continue;
      if (axis.nprocs == call.nranks && axis.source == 0 && axis.block * axis.nprocs == axis.extent) continue;
      return Unimplemented(algo, " needs ", name, " cut evenly over all ", call.nranks, " ranks from rank 0 on; got ",
                           axis.extent, " in blocks of ", axis.block, " over ", axis.nprocs, " from ", axis.source);
    }
  }
  return {};
}

struct Range {
  const char* name;
  const char* data;
  int64_t bytes;
};

Range RangeOf(const char* name, const Operand& x) {
  const int64_t rows = x.local_rows(), cols = x.local_cols();
  const int64_t bytes = rows > 0 && cols > 0 ? BytesOf(x.desc.type, (cols - 1) * x.desc.lld + rows) : 0;
  return {name, x.data, bytes};
}

Status CheckMemory(const MatmulCall& call, bool has_c) {
  const Range a = RangeOf("a", call.a), b = RangeOf("b", call.b), d = RangeOf("d", call.d);
  const Range c = has_c ? RangeOf("c", call.c) : Range{"c", nullptr, 0};
  for (const Range& range : {a, b, d}) {
    if (range.bytes > 0 && !range.data) return InvalidArgument(range.name, " is null; this rank holds a part of it");
  }
  const auto overlap = [&d](const Range& x) {
    return x.bytes > 0 && d.bytes > 0 && x.data < d.data + d.bytes && d.data < x.data + x.bytes;
  };
  for (const Range& range : {a, b}) {
    if (overlap(range)) return InvalidArgument("d shares memory with ", range.name, "; give D memory of its own");
  }
  const bool is_in_place = c.data == d.data && call.c.desc.lld == call.d.desc.lld;
  if (overlap(c) && !is_in_place) return InvalidArgument("d shares a part of c's memory; pass all of C as D, or none");
  return {};
}

void CopyArguments(const Arguments& in, MatmulCall* call) {
  const cublasMpMatmulDescriptor& desc = *in.matmul;
  const auto operand = [](const void* data, int64_t i, int64_t j, const cublasMpMatrixDescriptor& of) {
    constexpr int64_t kLeast = -kLargestExtent;  // is refused as well, and no subtraction overflows
    return Operand{static_cast<const char*>(data), std::max(i, kLeast) - 1, std::max(j, kLeast) - 1, of};
  };
  call->m = in.m;
  call->n = in.n;
  call->k = in.k;
  call->trans_a = AttributeOf<cublasOperation_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA);
  call->trans_b = AttributeOf<cublasOperation_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB);
  call->compute = AttributeOf<cublasComputeType_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMPUTE_TYPE);
  // Sums of integers are the same in any order.
  call->fixed_reduction_order =
      desc.fixed_reduction_order && (in.desc_a->type != CUDA_R_8I || in.desc_b->type != CUDA_R_8I);
  call->algo = AttributeOf<cublasMpMatmulAlgoType_t>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE);
  call->communication_sm_count = AttributeOf<int>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT);
  constexpr int kCommunication = CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE;
  if (desc.is_set[kCommunication]) call->communication_type = AttributeOf<int>(desc, kCommunication);
  const int epilog = AttributeOf<int>(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE);
  call->epilog = epilog & ~CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE;
  call->is_all_reduce = epilog & CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE;
  call->a = operand(in.a, in.ia, in.ja, *in.desc_a);
  call->b = operand(in.b, in.ib, in.jb, *in.desc_b);
  call->d = operand(in.d, in.id, in.jd, *in.desc_d);
  if (in.c) call->c = operand(in.c, in.ic, in.jc, *in.desc_c);
  call->rank = call->grid().comm.rank;
  call->nranks = call->grid().comm.nranks;
}

Status CheckPieces(const MatmulCall& call) {
  const double pieces = MostPieces(call);
  if (pieces <= kMostPieces) return {};
  return Unimplemented("a product of m=", call.m, ", n=", call.n, ", k=", call.k, " in these blocks would be cut ",
                       "into some ", pieces, " pieces; larger blocks make fewer");
}

Status CheckLayout(const MatmulCall& call) {
  const Side sides[] = {
      {"A", &call.a, call.is_a_plain() ? call.m : call.k, call.is_a_plain() ? call.k : call.m},
      {"B", &call.b, call.is_b_plain() ? call.k : call.n, call.is_b_plain() ? call.n : call.k},
      {"D", &call.d, call.m, call.n},
  };
  for (const Side& side : sides) JAXMP_RETURN_IF_ERROR(CheckSubmatrix(side));
  JAXMP_RETURN_IF_ERROR(CheckGrids(call));
  JAXMP_RETURN_IF_ERROR(CheckBlocks(call));
  JAXMP_RETURN_IF_ERROR(CheckPieces(call));
  return CheckAllReduce(call);
}

}  // namespace

Status CheckMatrix(const cublasMpMatrixDescriptor& desc) {
  struct Along {
    const char *extent, *block, *source;
    const Axis& axis;
  };
  for (const Along& along : {Along{"m", "mb", "rsrc", desc.rows}, Along{"n", "nb", "csrc", desc.cols}}) {
    const Axis& axis = along.axis;
    if (axis.extent < 0) return InvalidArgument(along.extent, " must not be negative, got ", axis.extent);
    if (axis.extent > kLargestExtent) return Unimplemented(along.extent, " is ", axis.extent, ", over 2^40");
    if (axis.block <= 0) return InvalidArgument(along.block, " must be positive, got ", axis.block);
    if (axis.block > kLargestExtent) return Unimplemented(along.block, " is ", axis.block, ", over 2^40");
    if (axis.source < 0 || axis.source >= axis.nprocs) {
      return InvalidArgument(along.source, " must be in [0, ", axis.nprocs, "), got ", axis.source);
    }
  }
  if (Facts(desc.type).bytes == 0) return Unimplemented(NameOf(desc.type), " is not a type that hostmp computes");
  const int64_t rows = LocalExtent(desc.rows, RowOf(desc.grid, desc.grid.comm.rank));
  if (desc.lld < std::max<int64_t>(1, rows)) {
    return InvalidArgument("lld is ", desc.lld, " but this rank holds ", rows,
                           " rows; it must be positive and no less than them");
  }
  if (desc.lld > INT_MAX) return Unimplemented("lld must fit 32 bits, got ", desc.lld);
  const int64_t cols = LocalExtent(desc.cols, ColOf(desc.grid, desc.grid.comm.rank));
  const bool fits = Fits(desc.cols.extent, desc.rows.extent, kMostElements);
  if (fits && Fits(std::max<int64_t>(1, cols), desc.lld, kMostElements)) return {};
  return Unimplemented("a matrix of ", desc.rows.extent, "x", desc.cols.extent, " with lld=", desc.lld,
                       " has more than 2^44 elements");
}

Status ReadCall(const Arguments& in, bool executes, MatmulCall* call) {
  JAXMP_RETURN_IF_ERROR(CheckPresent(in));
  if (!blas_is_loaded()) return FailedPrecondition("no BLAS is loaded; call LoadBlas first");
  JAXMP_RETURN_IF_ERROR(CheckExtents(in));
  CopyArguments(in, call);
  JAXMP_RETURN_IF_ERROR(CheckTypes(*call));
  // As the header says, the query never reads alpha, and reads beta only without C, to see that it is 0.
  if (executes) call->alpha = ReadScalar(in.alpha, call->accumulator());
  if (executes || !in.c) call->beta = ReadScalar(in.beta, call->accumulator());
  call->has_c = in.c != nullptr;
  call->reads_c = call->has_c && call->beta != 0.0;
  JAXMP_RETURN_IF_ERROR(CheckLayout(*call));
  JAXMP_RETURN_IF_ERROR(CheckC(*call, in.c != nullptr));
  JAXMP_RETURN_IF_ERROR(ReadEpilog(*in.matmul, executes, call));
  JAXMP_RETURN_IF_ERROR(ReadScales(*in.matmul, executes, call));
  JAXMP_RETURN_IF_ERROR(CheckUnsupported(*in.matmul, *call));
  JAXMP_RETURN_IF_ERROR(CheckAlgorithm(*call));
  if (executes) JAXMP_RETURN_IF_ERROR(CheckMemory(*call, in.c != nullptr));
  call->tiling = TilingOf(*call, in.matmul);
  return {};
}

Status CheckWorkspace(const MatmulCall& call, const void* device, size_t device_bytes) {
  const auto needed = static_cast<size_t>(call.tiling->workspace_bytes);
  if (device_bytes < needed) {
    return InvalidArgument("workspaceSizeInBytesOnDevice is ", device_bytes, " but this product needs ", needed,
                           "; pass what cublasMpMatmul_bufferSize returned");
  }
  if (needed > 0 && !device) return InvalidArgument("d_work is null but this product needs ", needed, " bytes");
  return {};
}

}  // namespace jaxmp::hostmp
