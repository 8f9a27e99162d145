// The definitions of hostmp_world.h.
#ifndef JAXMP_TESTS_HOSTMP_WORLD_IMPL_H_
#define JAXMP_TESTS_HOSTMP_WORLD_IMPL_H_

#include <algorithm>

#include "tests/cpp/definitions.h"
#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {

// Small integers, of which sums of some thousand are exact in every accumulator.
inline void fill_integers(Matrix* matrix, bool is_complex, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> digit(-3, 3);
  for (Number& value : matrix->values) {
    const double real = digit(random);
    value = {real, is_complex ? double(digit(random)) : 0.0};
  }
}

inline void check_ok(cublasMpStatus_t status) {
  if (status != CUBLASMP_STATUS_SUCCESS) check::report(false, __FILE__, __LINE__, host_api().last_error());
}

template <typename T>
void set(cublasMpMatmulDescriptor_t desc, int attribute, const T& value) {
  check_ok(host_api().MatmulDescriptorSetAttribute(desc, static_cast<cublasMpMatmulDescriptorAttribute_t>(attribute),
                                                   &value, sizeof(value)));
}

inline World::World(const Case& given, const std::function<void(World*)>& fill)
    : c(given), layouts(layouts_of(given)), group(given.nranks()) {
  const bool is_complex = Facts(c.in).is_complex;
  a = Matrix(layouts.a.rows, layouts.a.cols);
  b = Matrix(layouts.b.rows, layouts.b.cols);
  c0 = Matrix(c.m, c.n);
  fill_integers(&a, is_complex, 1);
  fill_integers(&b, is_complex, 2);
  fill_integers(&c0, is_complex, 3);
  aux0 = Matrix(c.m, c.n);
  fill_integers(&aux0, is_complex, 4);
  if (fill) fill(this);
  for (int64_t i = 0; i < c.m; ++i) bias.push_back(double(i % 5) - 2);
  ranks.resize(static_cast<size_t>(c.nranks()));
  errors.resize(ranks.size());
  for (int rank = 0; rank < c.nranks(); ++rank) make_rank(rank);
}

inline int64_t World::lld(const Layout& layout, int rank) const {
  return std::max<int64_t>(1, layout.local_shape(rank).first) + c.extra_ld;
}

inline Owned<cublasMpMatrixDescriptor> World::make_matrix(Rank& rank, int number, const Layout& layout,
                                                          cudaDataType_t type) {
  const MpApi& api = host_api();
  cublasMpGrid_t grid = nullptr;
  check_ok(api.GridCreate(layout.grid.nprow, layout.grid.npcol, layout.grid.layout, group.comm(number), &grid));
  rank.grids.emplace_back(grid, api.GridDestroy);
  cublasMpMatrixDescriptor_t desc = nullptr;
  check_ok(api.MatrixDescriptorCreate(layout.rows, layout.cols, layout.mb, layout.nb, layout.rsrc, layout.csrc,
                                      lld(layout, number), type, grid, &desc));
  return {desc, api.MatrixDescriptorDestroy};
}

inline std::unique_ptr<Buffer> World::scatter(const Matrix& whole, const Layout& layout, int rank,
                                              cudaDataType_t type) const {
  const auto [rows, cols] = layout.local_shape(rank);
  const int64_t ld = lld(layout, rank), bytes = hostmp::BytesOf(type, cols * ld);
  auto buffer = std::make_unique<Buffer>(static_cast<size_t>(rows > 0 && cols > 0 ? bytes : 0));
  for (int64_t j = 0; j < layout.cols; ++j) {
    for (int64_t i = 0; i < layout.rows; ++i) {
      if (layout.owner(i, j) != rank) continue;
      // An all-reduce's C is the same on every rank, side by side.
      const Number value = whole.at(i, whole.cols > 0 ? j % whole.cols : 0);
      encode_at(type, value, buffer->get(), layout.local_col(j) * ld + layout.local_row(i));
    }
  }
  return buffer;
}

inline void World::make_rank(int number) {
  const MpApi& api = host_api();
  Rank& rank = ranks[static_cast<size_t>(number)];
  rank.desc_a = make_matrix(rank, number, layouts.a, c.in);
  rank.desc_b = make_matrix(rank, number, layouts.b, c.type_b());
  rank.desc_d = make_matrix(rank, number, layouts.d, c.out);
  rank.a = scatter(a, layouts.a, number, c.in);
  rank.b = scatter(b, layouts.b, number, c.type_b());
  rank.c = scatter(c0, layouts.d, number, c.out);
  rank.d = std::make_unique<Buffer>(rank.c->size());
  if (c.is_in_place) std::memcpy(rank.d->get(), rank.c->get(), rank.c->size());

  cublasMpHandle_t handle = nullptr;
  check_ok(api.Create(&handle, nullptr));
  rank.handle = {handle, api.Destroy};
  const bool is_double = c.in == CUDA_R_64F || c.in == CUDA_C_64F;
  cublasMpMatmulDescriptor_t matmul = nullptr;
  const cublasComputeType_t narrow = c.accumulator() == CUDA_R_32I ? CUBLAS_COMPUTE_32I : c.single;
  check_ok(api.MatmulDescriptorCreate(&matmul, is_double ? CUBLAS_COMPUTE_64F : narrow));
  rank.matmul = {matmul, api.MatmulDescriptorDestroy};
  if (c.fixed_reduction_order) check_ok(api.fix_reduction_order(matmul));
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, c.trans_a);
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, c.trans_b);
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, c.epilog | (c.pattern == Pattern::kAllReduce ? 1 : 0));

  make_bias(number);
  if (has_aux(c.epilog)) make_aux(number);
  encode(c.accumulator(), c.alpha, rank.alpha.data());
  // cuBLASMp's all-reduce adds every rank's beta C, so one rank alone has a beta.
  const bool adds_c = c.pattern != Pattern::kAllReduce || number == 0;
  encode(c.accumulator(), adds_c ? c.beta : 0, rank.beta.data());
  size_t bytes = 0;
  check_ok(query(number, &bytes));
  rank.workspace = std::make_unique<Buffer>(bytes);
  for (const Buffer* buffer : {rank.a.get(), rank.b.get(), rank.c.get()}) before_.push_back(buffer->all());
  before_.push_back(is_derivative(c.epilog) ? rank.aux->all() : std::vector<char>());
}

inline void World::make_bias(int number) {
  Rank& rank = ranks[static_cast<size_t>(number)];
  const cublasMpMatmulDescriptor_t matmul = rank.matmul.get();
  const int64_t rows = layouts.d.local_shape(number).first;
  if (has_bias(c.epilog)) {
    rank.bias = std::make_unique<Buffer>(static_cast<size_t>(rows * Facts(c.out).bytes));
    for (int64_t i = 0; i < c.m; ++i) {
      const bool holds_row = c.n > 0 && layouts.d.local_shape(number).second > 0;
      for (int64_t j = 0; holds_row && j < layouts.d.cols; ++j) {
        if (layouts.d.owner(i, j) != number) continue;
        encode(c.out, bias[static_cast<size_t>(i)], rank.bias->get() + layouts.d.local_row(i) * Facts(c.out).bytes);
        break;
      }
    }
    const void* pointer = rank.bias->get();
    set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER, pointer);
  }
  if (!has_gradient(c.epilog)) return;
  const int64_t size = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB ? c.n : rows;
  rank.gradient = std::make_unique<Buffer>(static_cast<size_t>(size * Facts(c.out).bytes));
  const void* pointer = rank.gradient->get();
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER, pointer);
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME, CUBLASMP_RESULT_SCHEME_FULL);
}

inline void World::make_aux(int number) {
  Rank& rank = ranks[static_cast<size_t>(number)];
  const cublasMpMatmulDescriptor_t matmul = rank.matmul.get();
  const auto [rows, cols] = layouts.d.local_shape(number);
  rank.aux_ld = hostmp::RoundUp(rows, is_relu(c.epilog) ? 128 : 8);
  const int64_t bytes = is_relu(c.epilog) ? rank.aux_ld / 8 : rank.aux_ld * Facts(c.out).bytes;
  rank.aux = std::make_unique<Buffer>(static_cast<size_t>(bytes * cols));
  const void* pointer = rank.aux->get();
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, pointer);
  set(matmul, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, rank.aux_ld);
  if (!is_derivative(c.epilog)) return;
  for (int64_t j = 0; j < layouts.d.cols; ++j) {
    for (int64_t i = 0; i < c.m; ++i) {
      if (layouts.d.owner(i, j) != number) continue;
      const Number value = aux0.at(i, j % c.n);
      const int64_t row = layouts.d.local_row(i), col = layouts.d.local_col(j);
      if (is_relu(c.epilog)) {
        char& byte = rank.aux->get()[col * bytes + row / 8];
        const int bit = 1 << (row % 8);
        byte = static_cast<char>(value.real() > 0 ? byte | bit : byte & ~bit);
      } else {
        encode(c.out, value, rank.aux->get() + col * bytes + row * Facts(c.out).bytes);
      }
    }
  }
}

inline cublasMpStatus_t World::query(int number, size_t* device_bytes) {
  Rank& r = ranks[static_cast<size_t>(number)];
  void* const some = r.alpha.data();
  size_t host_bytes = 0;
  return host_api().Matmul_bufferSize(r.handle.get(), r.matmul.get(), c.m, c.n, c.k, r.alpha.data(), some, 1, 1,
                                      r.desc_a.get(), some, 1, 1, r.desc_b.get(), r.beta.data(),
                                      c.has_c ? some : nullptr, 1, 1, c.has_c ? r.desc_d.get() : nullptr, some, 1, 1,
                                      r.desc_d.get(), device_bytes, &host_bytes);
}

inline cublasMpStatus_t World::matmul(int number, hostmp::Stream* stream) {
  Rank& r = ranks[static_cast<size_t>(number)];
  check_ok(host_api().SetStream(r.handle.get(), hostmp::AsStream(stream)));
  const void* given_c = !c.has_c ? nullptr : c.is_in_place ? r.d->get() : r.c->get();
  return host_api().Matmul(r.handle.get(), r.matmul.get(), c.m, c.n, c.k, r.alpha.data(), r.a->get(), 1, 1,
                           r.desc_a.get(), r.b->get(), 1, 1, r.desc_b.get(), r.beta.data(), given_c, 1, 1,
                           given_c ? r.desc_d.get() : nullptr, r.d->get(), 1, 1, r.desc_d.get(), r.workspace->get(),
                           r.workspace->size(), nullptr, 0);
}

inline void World::run(hostmp::Pool* pool, bool on_threads) {
  struct Waiting {
    std::mutex mutex;
    std::condition_variable wake;
    size_t left;
  } waiting{{}, {}, ranks.size()};
  struct Context {
    Waiting* waiting;
    std::string* error;
  };
  std::vector<Context> contexts(ranks.size());
  std::vector<hostmp::Stream> streams(ranks.size());
  const auto done = [](void* context, const Status& status) {
    auto* const self = static_cast<Context*>(context);
    std::lock_guard<std::mutex> lock(self->waiting->mutex);
    *self->error = status.message();
    if (--self->waiting->left == 0) self->waiting->wake.notify_all();
  };
  const auto start = [&](int rank) {
    const auto i = static_cast<size_t>(rank);
    contexts[i] = {&waiting, &errors[i]};
    streams[i] = {&rendezvous, run_id, 7, pool, done, &contexts[i]};
    if (matmul(rank, &streams[i]) == CUBLASMP_STATUS_SUCCESS) return;
    hostmp::Fail(streams[i], rank, c.nranks(), InvalidArgument(host_api().last_error()));
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < c.nranks(); ++rank) {
    on_threads ? threads.emplace_back(start, rank), void() : start(rank);
  }
  for (std::thread& thread : threads) thread.join();
  std::unique_lock<std::mutex> lock(waiting.mutex);
  waiting.wake.wait(lock, [&] { return waiting.left == 0; });
}

inline Matrix World::gather(int64_t copy) const {
  const bool is_all_reduce = c.pattern == Pattern::kAllReduce;
  std::vector<int64_t> llds;
  for (size_t rank = 0; rank < ranks.size(); ++rank) llds.push_back(lld(layouts.d, static_cast<int>(rank)));
  Matrix whole(c.m, c.n);
  for (int64_t j = 0; j < c.n; ++j) {
    for (int64_t i = 0; i < c.m; ++i) {
      const int64_t col = is_all_reduce ? copy * c.n + j : j;
      const auto rank = static_cast<size_t>(layouts.d.owner(i, col));
      const int64_t at = layouts.d.local_col(col) * llds[rank] + layouts.d.local_row(i);
      whole.at(i, j) = decode(c.out, ranks[rank].d->get() + at * Facts(c.out).bytes);
    }
  }
  return whole;
}

inline void World::check_untouched() const {
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Rank& rank = ranks[i];
    CHECK(rank.a->all() == before_[4 * i]);
    CHECK(rank.b->all() == before_[4 * i + 1]);
    CHECK(rank.c->all() == before_[4 * i + 2]);
    if (is_derivative(c.epilog)) CHECK(rank.aux->all() == before_[4 * i + 3]);
    CHECK(rank.d->margins_are_intact());
    CHECK(rank.workspace->margins_are_intact());
    if (rank.aux) CHECK(rank.aux->margins_are_intact());
    if (rank.gradient) CHECK(rank.gradient->margins_are_intact());
  }
}

// op(A) op(B) in double, with |op(A)| |op(B)| for bounds.
inline void multiply(const World& world, Matrix* product, Matrix* magnitude) {
  const Case& c = world.c;
  const auto op = [](const Matrix& x, cublasOperation_t trans, int64_t i, int64_t j) {
    if (trans == CUBLAS_OP_N) return x.at(i, j);
    return trans == CUBLAS_OP_T ? x.at(j, i) : std::conj(x.at(j, i));
  };
  *product = Matrix(c.m, c.n);
  *magnitude = Matrix(c.m, c.n);
  const bool is_complex = Facts(c.in).is_complex;
  // Plain arrays of real parts, column by column of D: the sanitizers look at every access.
  const auto m = static_cast<size_t>(c.m);
  std::vector<double> rows(m * static_cast<size_t>(c.k)), sums(m), bounds(m);
  for (int64_t l = 0; l < c.k; ++l) {
    for (int64_t i = 0; i < c.m; ++i) rows[static_cast<size_t>(l * c.m + i)] = op(world.a, c.trans_a, i, l).real();
  }
  for (int64_t j = 0; j < c.n; ++j) {
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(bounds.begin(), bounds.end(), 0.0);
    for (int64_t l = 0; l < c.k; ++l) {
      const Number y = op(world.b, c.trans_b, l, j);
      if (is_complex) {
        for (int64_t i = 0; i < c.m; ++i) {
          const Number x = op(world.a, c.trans_a, i, l);
          product->at(i, j) += x * y;
          magnitude->at(i, j) += std::abs(x) * std::abs(y);
        }
        continue;
      }
      const double* x = rows.data() + l * c.m;
      double *sum = sums.data(), *bound = bounds.data();
      for (size_t i = 0; i < m; ++i) {
        const double term = x[i] * y.real();
        sum[i] += term;
        bound[i] += std::abs(term);
      }
    }
    for (int64_t i = 0; i < c.m && !is_complex; ++i) {
      product->at(i, j) = sums[static_cast<size_t>(i)];
      magnitude->at(i, j) = bounds[static_cast<size_t>(i)];
    }
  }
}

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_HOSTMP_WORLD_IMPL_H_
