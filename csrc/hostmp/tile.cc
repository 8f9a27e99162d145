#include "csrc/hostmp/tile.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/hostmp/blas.h"
#include "csrc/hostmp/elementwise.h"
#include "csrc/hostmp/epilog.h"
#include "csrc/hostmp/narrow_product.h"
#include "csrc/hostmp/ordered_kernel.h"
#include "csrc/hostmp/rounded.h"

namespace jaxmp::hostmp {
namespace {

// A rectangle of local memory.
struct Block {
  char* data;
  int64_t ld;
};

Block locate(const Operand& x, int64_t row, int64_t col) {
  const int64_t ld = x.desc.lld;
  return {const_cast<char*>(x.data) + bytes_of(x.desc.type, col * ld + row), ld};
}

// The tile's place in D: on which rank, and at which local row and column.
struct Place {
  int64_t rank, row, col;
};

class TileRun {
 public:
  TileRun(const Product2D& product, const Tile& tile, char* workspace)
      : product_(product),
        tile_(tile),
        m_(product.schedule.m[static_cast<size_t>(tile.m_cut)]),
        n_(product.schedule.n[static_cast<size_t>(tile.n_cut)]),
        call_(*product.calls[0]),
        scratch_(workspace ? workspace + product.area.sums_bytes : nullptr),
        seam_(scratch_ + product.area.scratch_bytes),
        pieces_(seam_ + product.area.seam_bytes),
        place_(find_place()),
        is_in_d_(sums_in_d(call_, product.schedule, tile)),
        z_(is_in_d_ ? d_of(place_.rank) : Block{workspace, tile.rows}) {}

  void operator()() {
    call_.is_ordered ? sum_in_order() : sum();
    for_ranks([](TileRun& part) {
      part.finish();
      if (part.call_.is_all_reduce) part.copy_to_peers();
    });
  }

 private:
  // The part of a tile of several cuts that lies in the given one.
  TileRun(const TileRun& whole, const Tile& tile)
      : product_(whole.product_),
        tile_(tile),
        m_(whole.m_),
        n_(product_.schedule.n[static_cast<size_t>(tile.n_cut)]),
        call_(whole.call_),
        scratch_(whole.scratch_),
        seam_(whole.seam_),
        pieces_(whole.pieces_),
        place_(find_place()),
        is_in_d_(whole.is_in_d_),
        z_(whole.z_) {
    z_.data += bytes_of(call_.accumulator(), (n_.begin - whole.n_.begin) * z_.ld);
  }

  // For the columns of each rank apart: C, D, aux and the epilog's inputs are its own.
  template <typename Function>
  void for_ranks(Function function) {
    if (is_of_one_rank()) return function(*this);
    for (int32_t cut = tile_.n_cut; cut < tile_.n_cut + tile_.n_cuts; ++cut) {
      const int64_t cols = product_.schedule.n[static_cast<size_t>(cut)].size;
      TileRun part(*this, Tile{tile_.m_cut, cut, tile_.row, tile_.rows, 0, cols});
      function(part);
    }
  }

  bool is_of_one_rank() const { return product_.schedule.is_together_in_d(tile_); }

  Place find_place() const {
    const int64_t rank = call_.is_all_reduce ? 0 : rank_of(call_.grid(), m_.proc[0], n_.proc[0]);
    return {rank, m_.local[0] + tile_.row, n_.local[0] + tile_.col};
  }

  const Call& owner() const { return *product_.calls[static_cast<size_t>(place_.rank)]; }
  Block d_of(int64_t rank) const {
    return locate(product_.calls[static_cast<size_t>(rank)]->d, place_.row, place_.col);
  }

  // z = beta C, and onto it the products, as fast as the BLAS does them.
  void sum() {
    bool is_started = !is_of_one_rank();  // of whom some may read C, and others not
    if (is_started) fill_zero();
    for_ranks([&](TileRun& part) { is_started = part.add_c(is_started); });
    for (const Cut& cut : product_.schedule.k) {
      call_.is_narrow() ? add_narrow(cut, is_started) : add_product(product_of(cut), is_started);
      is_started = true;
    }
    if (!is_started) fill_zero();
  }

  // z = alpha (the sum over k in ascending order) + beta C.
  void sum_in_order() {
    const bool is_started = call_.is_narrow() ? multiply_narrow_in_order() : multiply_in_order();
    if (!is_started) fill_zero();
    const std::complex<double> alpha = call_.alpha * tensor_scale();
    if (alpha != 1.0) {
      scale_sums(z_.data, z_.ld, tile_.rows, tile_.cols, alpha.real(), alpha.imag(), call_.accumulator());
    }
    for_ranks([](TileRun& part) { part.add_c(true); });
  }

  // Of A and B; the ranks agree on tensor-wide scales.
  double tensor_scale() const {
    double scale = 1;
    for (const Scales* scales : {&call_.scale_a, &call_.scale_b}) {
      if (scales->mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32) scale *= static_cast<double>(scales->scalar());
    }
    return scale;
  }

  bool multiply_narrow_in_order() {
    std::vector<NarrowProduct> parts;
    for (const Cut& cut : product_.schedule.k) parts.push_back(narrow_product_of(cut));
    if (!parts.empty()) narrow_gemm_in_order(parts, scratch_);
    return !parts.empty();
  }

  bool multiply_in_order() {
    const int64_t unit = ordered_unit(call_.a.desc.type);
    Parts parts;
    char* seam = seam_;
    int64_t at = 0;  // up to where the parts have come
    for (const Cut& cut : product_.schedule.k) {
      const int64_t end = cut.begin + cut.size;
      const int64_t whole = end == call_.k ? end : end / unit * unit;
      if (at < whole) parts.push_back(product_of(part_of(cut, at, whole)));
      at = std::max(at, whole);
      if (at >= end) continue;
      parts.push_back(seam_at(at, std::min(at + unit, call_.k), seam));
      seam += seam_bytes(call_, parts.back().k, tile_.rows, tile_.cols);
      at += parts.back().k;
    }
    if (!parts.empty()) ordered_gemm(call_.a.desc.type, parts, false, scratch_);
    return !parts.empty();
  }

  static Cut part_of(const Cut& cut, int64_t begin, int64_t end) {
    const int64_t skipped = begin - cut.begin;
    return {begin, end - begin, {cut.proc[0], cut.proc[1]}, {cut.local[0] + skipped, cut.local[1] + skipped}};
  }

  // What lies around a cut of k, copied together; only 16-bit types have seams.
  Product seam_at(int64_t begin, int64_t end, char* memory) {
    const int64_t size = end - begin;
    uint16_t* const a = reinterpret_cast<uint16_t*>(memory);
    uint16_t* const b = a + tile_.rows * size;
    for (const Cut& cut : product_.schedule.k) {
      const int64_t from = std::max(begin, cut.begin), to = std::min(end, cut.begin + cut.size);
      if (from >= to) continue;
      const Product p = product_of(part_of(cut, from, to));
      const bool is_a_plain = p.trans_a == abi::CUBLAS_OP_N, is_b_plain = p.trans_b == abi::CUBLAS_OP_N;
      for (int64_t k = 0; k < p.k; ++k) {
        for (int64_t row = 0; row < p.m; ++row) {
          a[(from - begin + k) * p.m + row] =
              static_cast<const uint16_t*>(p.a)[is_a_plain ? k * p.lda + row : row * p.lda + k];
        }
        for (int64_t col = 0; col < p.n; ++col) {
          b[col * size + from - begin + k] =
              static_cast<const uint16_t*>(p.b)[is_b_plain ? col * p.ldb + k : k * p.ldb + col];
        }
      }
    }
    return {abi::CUBLAS_OP_N, abi::CUBLAS_OP_N, tile_.rows, tile_.cols, size, a, tile_.rows, b, size, z_.data, z_.ld};
  }

  // z (+)= beta C. cuBLASMp's all-reduce sums what each rank adds, beta and C being the rank's own.
  bool add_c(bool is_started) {
    const int64_t first = call_.is_all_reduce ? 0 : place_.rank;
    const int64_t last = call_.is_all_reduce ? call_.nranks - 1 : place_.rank;
    for (int64_t rank = first; rank <= last; ++rank) {
      const Call& call = *product_.calls[static_cast<size_t>(rank)];
      if (!call.reads_c) continue;
      const Block c = locate(call.c, place_.row, place_.col);
      const std::complex<double> beta = call.beta * static_cast<double>(call.scale_c.scalar());
      scale_c(c.data, c.ld, z_.data, z_.ld, tile_.rows, tile_.cols, beta.real(), beta.imag(), is_started,
              call.accumulator(), call.c.desc.type);
      is_started = true;
    }
    return is_started;
  }

  Product product_of(const Cut& k) const {
    const bool is_a_plain = call_.trans_a == abi::CUBLAS_OP_N;
    const Block a = piece(&Call::a, is_a_plain, {m_.proc[1], m_.local[1] + tile_.row}, {k.proc[0], k.local[0]});
    const Block b = product_.schedule.is_together_in_b(tile_) ? piece_of_b(k, n_, tile_.col) : pieces_of_b(k);
    return {call_.trans_a, call_.trans_b, tile_.rows, tile_.cols, k.size, a.data, a.ld, b.data, b.ld, z_.data, z_.ld};
  }

  Block piece_of_b(const Cut& k, const Cut& n, int64_t col) const {
    return piece(&Call::b, call_.trans_b == abi::CUBLAS_OP_N, {k.proc[1], k.local[1]}, {n.proc[1], n.local[1] + col});
  }

  // Those of all ranks, put together as they are stored.
  Block pieces_of_b(const Cut& k) const {
    const abi::cudaDataType_t type = call_.b.desc.type;
    const bool is_plain = call_.trans_b == abi::CUBLAS_OP_N;
    const Block all = {pieces_ + bytes_of(type, k.begin * tile_.cols), is_plain ? k.size : tile_.cols};
    for (int32_t i = tile_.n_cut; i < tile_.n_cut + tile_.n_cuts; ++i) {
      const Cut& n = product_.schedule.n[static_cast<size_t>(i)];
      const int64_t col = n.begin - n_.begin;
      const Block from = piece_of_b(k, n, 0);
      char* const to = all.data + bytes_of(type, is_plain ? col * all.ld : col);
      copy_columns(type, from, is_plain ? k.size : n.size, is_plain ? n.size : k.size, {to, all.ld});
    }
    return all;
  }

  static void copy_columns(abi::cudaDataType_t type, const Block& from, int64_t rows, int64_t cols, const Block& to) {
    for (int64_t col = 0; col < cols; ++col) {
      std::memcpy(to.data + bytes_of(type, col * to.ld), from.data + bytes_of(type, col * from.ld),
                  static_cast<size_t>(bytes_of(type, rows)));
    }
  }

  void add_product(const Product& product, bool adds) {
    const double one = adds ? 1 : 0;
    const std::complex<double> alpha = call_.alpha;
    if (rounds_operands(call_.compute)) {
      return gemm_rounded(call_.compute, call_.a.desc.type, product, Complex64(alpha), static_cast<float>(one),
                          scratch_);
    }
    if (alpha == 1.0 && is_thin(call_.a.desc.type, product)) {
      return thin_gemm(call_.a.desc.type, product, adds);
    }
    switch (call_.a.desc.type) {
      case abi::CUDA_R_64F:
        return gemm(product, alpha.real(), one);
      case abi::CUDA_C_32F:
        return gemm(product, Complex64(alpha), Complex64(static_cast<float>(one)));
      case abi::CUDA_C_64F:
        return gemm(product, alpha, Complex128(one));
      case abi::CUDA_R_32F:
        return gemm(product, static_cast<float>(alpha.real()), static_cast<float>(one));
      default:
        return gemm16(call_.a.desc.type, product, static_cast<float>(alpha.real()), static_cast<float>(one), scratch_);
    }
  }

  // The operand's piece, with the scales of the rank that holds it.
  NarrowOperand narrow_piece(Operand Call::* operand, Scales Call::* scales, bool is_adjacent_in_k, const Cut& k,
                             int along_k, const Cut& other, int64_t at) const {
    const int64_t proc_k = k.proc[along_k], proc = other.proc[1], local_k = k.local[along_k],
                  local = other.local[1] + at;
    const int64_t rank = is_adjacent_in_k ? rank_of((call_.*operand).desc.grid, proc_k, proc)
                                          : rank_of((call_.*operand).desc.grid, proc, proc_k);
    const Call& holder = *product_.calls[static_cast<size_t>(rank)];
    const Operand& x = holder.*operand;
    const Block block = is_adjacent_in_k ? locate(x, local_k, local) : locate(x, local, local_k);
    return {x.desc.type, block.data,     block.ld, is_adjacent_in_k, holder.*scales,
            local_k,     x.local_rows(), local,    x.local_cols()};
  }

  NarrowProduct narrow_product_of(const Cut& k) const {
    const bool is_a_k = call_.trans_a != abi::CUBLAS_OP_N, is_b_k = call_.trans_b == abi::CUBLAS_OP_N;
    const NarrowOperand a = narrow_piece(&Call::a, &Call::scale_a, is_a_k, k, 0, m_, tile_.row);
    const NarrowOperand b = narrow_piece(&Call::b, &Call::scale_b, is_b_k, k, 1, n_, tile_.col);
    return {tile_.rows, tile_.cols, k.size, a, b, z_.data, z_.ld};
  }

  void add_narrow(const Cut& k, bool adds) {
    narrow_gemm(narrow_product_of(k), call_.alpha.real() * tensor_scale(), adds, scratch_);
  }

  // Where op(X) is at (row, col), each given as the process coordinate and the local index along that axis of op(X).
  struct Index {
    int64_t proc, local;
  };
  Block piece(Operand Call::* operand, bool is_plain, Index row, Index col) const {
    if (!is_plain) std::swap(row, col);
    const int64_t rank = rank_of((call_.*operand).desc.grid, row.proc, col.proc);
    return locate(product_.calls[static_cast<size_t>(rank)]->*operand, row.local, col.local);
  }

  void fill_zero() {
    const int64_t bytes = facts(call_.accumulator()).bytes;
    for (int64_t col = 0; col < tile_.cols; ++col) {
      std::memset(z_.data + col * z_.ld * bytes, 0, static_cast<size_t>(tile_.rows * bytes));
    }
  }

  void finish() {
    const Epilog* epilog = find_epilog(call_.epilog);
    if (is_in_d_ && epilog->is_plain()) return;
    if (call_.stores_narrow()) return finish_narrow(epilog);
    apply_epilog(epilog, d_of(place_.rank), call_.d.desc.type);
  }

  // The epilog from the sums into `to`, of type `out`.
  void apply_epilog(const Epilog* epilog, const Block& to, abi::cudaDataType_t out) {
    const void* bias = epilog->has_bias ? bias_of_tile(out) : nullptr;
    const Aux aux = epilog->has_aux ? aux_of(place_.rank) : Aux{};
    uint32_t amax = 0;
    finish_tile({epilog, tile_.rows, tile_.cols, z_.data, z_.ld, to.data, to.ld, bias, aux.data, aux.ld, aux.rows,
                 call_.aux_type, owner().scale_aux.scalar(), &amax},
                call_.accumulator(), out);
    raise(&Call::amax_aux, amax);
  }

  // The tile's part of the bias, as `type`.
  const void* bias_of_tile(abi::cudaDataType_t type) const {
    const abi::cudaDataType_t have = call_.bias_type;
    const char* const bias = static_cast<const char*>(owner().bias) + bytes_of(have, place_.row);
    if (have == type) return bias;
    float* const wide = reinterpret_cast<float*>(scratch_);  // fp8 operands only; their products are done with it
    if (have == abi::CUDA_R_16BF) widen(reinterpret_cast<const BFloat16*>(bias), wide, tile_.rows);
    if (have == abi::CUDA_R_16F) widen(reinterpret_cast<const Float16*>(bias), wide, tile_.rows);
    return wide;
  }

  // fp8 and fp4: the epilog in floats where the sums are, then scaled and encoded.
  void finish_narrow(const Epilog* epilog) {
    if (!epilog->is_plain()) apply_epilog(epilog, z_, abi::CUDA_R_32F);
    const Block d = d_of(place_.rank);
    const int64_t rows_of_part = call_.is_all_reduce ? call_.m : owner().d.local_rows();
    const uint32_t amax = store_narrow({call_.d.desc.type, reinterpret_cast<const float*>(z_.data), z_.ld, tile_.rows,
                                        tile_.cols, d.data, d.ld, owner().scale_d.scalar(), owner().d_out_scale.mode,
                                        static_cast<uint8_t*>(const_cast<void*>(owner().d_out_scale.data)), place_.row,
                                        place_.col, rows_of_part});
    raise(&Call::amax_d, amax);
  }

  // Raises the maximum of every rank that holds the tile.
  void raise(uint32_t* Call::* most, uint32_t value) const {
    const int64_t last = call_.is_all_reduce ? call_.nranks - 1 : place_.rank;
    for (int64_t rank = place_.rank; rank <= last; ++rank) {
      uint32_t* const of_rank = product_.calls[static_cast<size_t>(rank)]->*most;
      if (of_rank) raise_to(of_rank, value);
    }
  }

  static void raise_to(uint32_t* most, uint32_t value) {
    uint32_t have = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (have < value && !__atomic_compare_exchange_n(most, &have, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  struct Aux {
    char* data = nullptr;
    int64_t ld = 0;      // bytes for RELU, elements for GELU
    int64_t rows = 0;    // with the padding, in the last tile of a column
    int64_t bytes = 0;   // of `rows`
    int64_t stride = 0;  // bytes
  };
  Aux aux_of(int64_t rank) const {
    const Call& call = *product_.calls[static_cast<size_t>(rank)];
    const int64_t local_rows = call.is_all_reduce ? call.m : call.d.local_rows();
    const bool is_last = place_.row + tile_.rows == local_rows;
    Aux aux;
    aux.rows = is_last ? call.aux_ld - place_.row : tile_.rows;
    const bool is_mask = find_epilog(call.epilog)->activation == Activation::kRelu;
    aux.ld = is_mask ? call.aux_ld / 8 : call.aux_ld;
    aux.stride = is_mask ? aux.ld : bytes_of(call.aux_type, aux.ld);
    aux.bytes = is_mask ? ceil_div(aux.rows, 8) : bytes_of(call.aux_type, aux.rows);
    const int64_t above = is_mask ? place_.row / 8 : bytes_of(call.aux_type, place_.row);
    aux.data = static_cast<char*>(call.aux) + place_.col * aux.stride + above;
    return aux;
  }

  void copy_to_peers() {
    const Block from = d_of(0);
    const Epilog* epilog = find_epilog(call_.epilog);
    const bool writes_aux = epilog->has_aux && !epilog->is_derivative;
    for (int64_t rank = 1; rank < call_.nranks; ++rank) {
      copy_columns(call_.d.desc.type, from, tile_.rows, tile_.cols, d_of(rank));
      if (call_.has_d_out_scale) copy_scales(*product_.calls[static_cast<size_t>(rank)]);
      if (!writes_aux) continue;
      const Aux source = aux_of(0), target = aux_of(rank);
      for (int64_t col = 0; col < tile_.cols; ++col) {
        std::memcpy(target.data + col * target.stride, source.data + col * source.stride,
                    static_cast<size_t>(source.bytes));
      }
    }
  }

  void copy_scales(const Call& to) const {
    const int64_t block = block_of(call_.d_out_scale.mode);
    for (int64_t col = place_.col; col < place_.col + tile_.cols; ++col) {
      for (int64_t row = place_.row; row < place_.row + tile_.rows; row += block) {
        const int64_t at = tiled_offset(row / block, col, call_.m / block);
        static_cast<uint8_t*>(const_cast<void*>(to.d_out_scale.data))[at] =
            static_cast<const uint8_t*>(call_.d_out_scale.data)[at];
      }
    }
  }

  const Product2D& product_;
  const Tile tile_;
  const Cut& m_;
  const Cut& n_;
  const Call& call_;  // rank 0's, for what all ranks share
  char* const scratch_;
  char* const seam_;
  char* const pieces_;
  const Place place_;
  const bool is_in_d_;
  Block z_;
};

}  // namespace

void run_tile(const Product2D& product, const Tile& tile, char* workspace) { TileRun(product, tile, workspace)(); }

}  // namespace jaxmp::hostmp
