#include "csrc/hostmp/tile.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/hostmp/blas.h"
#include "csrc/hostmp/epilog.h"
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
  return {const_cast<char*>(x.data) + (col * ld + row) * facts(x.desc.type).bytes, ld};
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
        seam_(scratch_ + product.area.scratch_bytes) {
    const int64_t rank = call_.is_all_reduce ? 0 : rank_of(call_.grid(), m_.proc[0], n_.proc[0]);
    place_ = {rank, m_.local[0] + tile.row, n_.local[0] + tile.col};
    z_ = sums_in_d(call_) ? d_of(rank) : Block{workspace, tile.rows};
  }

  void operator()() {
    call_.is_ordered ? sum_in_order() : sum();
    finish();
    if (call_.is_all_reduce) copy_to_peers();
  }

 private:
  const Call& owner() const { return *product_.calls[static_cast<size_t>(place_.rank)]; }
  Block d_of(int64_t rank) const {
    return locate(product_.calls[static_cast<size_t>(rank)]->d, place_.row, place_.col);
  }
  int64_t d_bytes() const { return facts(call_.d.desc.type).bytes; }

  // z = beta C, and onto it the products, as fast as the BLAS does them.
  void sum() {
    bool is_started = add_c(false);
    for (const Cut& cut : product_.schedule.k) {
      add_product(product_of(cut), is_started);
      is_started = true;
    }
    if (!is_started) fill_zero();
  }

  // z = alpha (the sum over k in ascending order) + beta C.
  void sum_in_order() {
    const int64_t unit = ordered_unit(call_.a.desc.type);
    bool is_started = false;
    const auto add = [&](const Product& product) {
      ordered_gemm(call_.a.desc.type, product, is_started, scratch_);
      is_started = true;
    };
    int64_t at = 0;  // up to where the sum has come
    for (const Cut& cut : product_.schedule.k) {
      const int64_t end = cut.begin + cut.size;
      const int64_t whole = end == call_.k ? end : end / unit * unit;
      if (at < whole) add(product_of(part_of(cut, at, whole)));
      at = std::max(at, whole);
      if (at < end) add(seam_at(at, std::min(at + unit, call_.k)));
      at = at < end ? std::min(at + unit, call_.k) : at;
    }
    if (!is_started) fill_zero();
    if (call_.alpha != 1.0) {
      scale_sums(z_.data, z_.ld, tile_.rows, tile_.cols, call_.alpha.real(), call_.alpha.imag(), call_.accumulator());
    }
    add_c(true);
  }

  static Cut part_of(const Cut& cut, int64_t begin, int64_t end) {
    const int64_t skipped = begin - cut.begin;
    return {begin, end - begin, {cut.proc[0], cut.proc[1]}, {cut.local[0] + skipped, cut.local[1] + skipped}};
  }

  // What lies around a cut of k, copied together; only 16-bit types have seams.
  Product seam_at(int64_t begin, int64_t end) {
    const int64_t size = end - begin;
    uint16_t* const a = reinterpret_cast<uint16_t*>(seam_);
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
      scale_c(c.data, c.ld, z_.data, z_.ld, tile_.rows, tile_.cols, call.beta.real(), call.beta.imag(), is_started,
              call.accumulator(), call.d.desc.type);
      is_started = true;
    }
    return is_started;
  }

  Product product_of(const Cut& k) const {
    const bool is_a_plain = call_.trans_a == abi::CUBLAS_OP_N, is_b_plain = call_.trans_b == abi::CUBLAS_OP_N;
    const Block a = piece(&Call::a, is_a_plain, {m_.proc[1], m_.local[1] + tile_.row}, {k.proc[0], k.local[0]});
    const Block b = piece(&Call::b, is_b_plain, {k.proc[1], k.local[1]}, {n_.proc[1], n_.local[1] + tile_.col});
    return {call_.trans_a, call_.trans_b, tile_.rows, tile_.cols, k.size, a.data, a.ld, b.data, b.ld, z_.data, z_.ld};
  }

  void add_product(const Product& product, bool adds) {
    const double one = adds ? 1 : 0;
    const std::complex<double> alpha = call_.alpha;
    if (rounds_operands(call_.compute)) {
      return gemm_rounded(call_.compute, call_.a.desc.type, product, Complex64(alpha), static_cast<float>(one),
                          scratch_);
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
    if (sums_in_d(call_) && epilog->is_plain()) return;
    const Block d = d_of(place_.rank);
    const void* bias = epilog->has_bias ? static_cast<const char*>(owner().bias) + place_.row * d_bytes() : nullptr;
    const Aux aux = epilog->has_aux ? aux_of(place_.rank) : Aux{};
    finish_tile({epilog, tile_.rows, tile_.cols, z_.data, z_.ld, d.data, d.ld, bias, aux.data, aux.ld, aux.rows},
                call_.accumulator(), call_.d.desc.type);
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
    aux.stride = is_mask ? aux.ld : aux.ld * d_bytes();
    aux.bytes = is_mask ? ceil_div(aux.rows, 8) : aux.rows * d_bytes();
    aux.data =
        static_cast<char*>(call.aux) + place_.col * aux.stride + (is_mask ? place_.row / 8 : place_.row * d_bytes());
    return aux;
  }

  void copy_to_peers() {
    const Block from = d_of(0);
    const Epilog* epilog = find_epilog(call_.epilog);
    const bool writes_aux = epilog->has_aux && !epilog->is_derivative;
    for (int64_t rank = 1; rank < call_.nranks; ++rank) {
      const Block to = d_of(rank);
      for (int64_t col = 0; col < tile_.cols; ++col) {
        std::memcpy(to.data + col * to.ld * d_bytes(), from.data + col * from.ld * d_bytes(),
                    static_cast<size_t>(tile_.rows * d_bytes()));
      }
      if (!writes_aux) continue;
      const Aux source = aux_of(0), target = aux_of(rank);
      for (int64_t col = 0; col < tile_.cols; ++col) {
        std::memcpy(target.data + col * target.stride, source.data + col * source.stride,
                    static_cast<size_t>(source.bytes));
      }
    }
  }

  const Product2D& product_;
  const Tile& tile_;
  const Cut& m_;
  const Cut& n_;
  const Call& call_;  // rank 0's, for what all ranks share
  char* scratch_;
  char* seam_;
  Place place_;
  Block z_;
};

}  // namespace

void run_tile(const Product2D& product, const Tile& tile, char* workspace) { TileRun(product, tile, workspace)(); }

}  // namespace jaxmp::hostmp
