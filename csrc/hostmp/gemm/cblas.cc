#include "csrc/hostmp/gemm/cblas.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxmp::hostmp {
namespace {

using abi::cublasOperation_t;

// CBLAS with 32-bit integers.
template <typename T>
using RealGemm = void (*)(int, int, int, int, int, int, T, const T*, int, const T*, int, T, T*, int);
using ComplexGemm = void (*)(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*,
                             void*, int);
using MixedGemm = void (*)(int, int, int, int, int, int, float, const uint16_t*, int, const uint16_t*, int, float,
                           float*, int);
constexpr int kColMajor = 102;
constexpr int kTransposes[] = {111, 112, 113};  // by cublasOperation_t

struct Libraries {
  RealGemm<float> sgemm = nullptr;
  RealGemm<double> dgemm = nullptr;
  ComplexGemm cgemm = nullptr, zgemm = nullptr;
  MixedGemm bf16 = nullptr, f16 = nullptr;
  BlasLibraries names;
};

// Written once, under the mutex, before `loaded` is set; never freed, because a product may run until the very end.
std::mutex load_mutex;
std::atomic<const Libraries*> loaded{nullptr};

// OpenBLAS from scipy-openblas32 carries a prefix; any other CBLAS does not.
template <typename Function>
bool find(void* library, const char* name, Function* function) {
  const std::string prefixed = std::string("scipy_") + name;
  void* symbol = dlsym(library, prefixed.c_str());
  if (!symbol) symbol = dlsym(library, name);
  *function = reinterpret_cast<Function>(symbol);
  return symbol != nullptr;
}

Status load_cblas(const char* path, Libraries* libraries) {
  // RTLD_LOCAL: numpy and scipy bring a BLAS with the same names.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return FailedPrecondition(std::string("jaxmp: cannot open the BLAS: ") + dlerror());
  const bool is_complete =
      find(library, "cblas_sgemm", &libraries->sgemm) && find(library, "cblas_dgemm", &libraries->dgemm) &&
      find(library, "cblas_cgemm", &libraries->cgemm) && find(library, "cblas_zgemm", &libraries->zgemm);
  if (!is_complete) {
    return FailedPrecondition(std::string("jaxmp: the BLAS ") + path +
                              " has no cblas_{s,d,c,z}gemm; pass the library of scipy-openblas32");
  }
  libraries->names.path = path;
  // The tiles are the parallelism: a BLAS that forks inside one would only oversubscribe.
  void (*set_num_threads)(int) = nullptr;
  if (find(library, "openblas_set_num_threads", &set_num_threads)) set_num_threads(1);
  char* (*get_config)() = nullptr;
  if (find(library, "openblas_get_config", &get_config)) libraries->names.config = get_config();
  return {};
}

Status load_mkl(const char* path, Libraries* libraries) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return FailedPrecondition(std::string("jaxmp: cannot open MKL: ") + dlerror());
  // The sequential layer has to be chosen before MKL's first computation.
  int (*set_threading_layer)(int) = nullptr;
  constexpr int kSequential = 1;
  if (find(library, "MKL_Set_Threading_Layer", &set_threading_layer)) set_threading_layer(kSequential);
  find(library, "cblas_gemm_bf16bf16f32", &libraries->bf16);
  find(library, "cblas_gemm_f16f16f32", &libraries->f16);
  libraries->names.mkl = path;
  return {};
}

template <typename T, typename Function>
void call_real(Function function, const Product& p, T alpha, T beta) {
  const auto plain = [](cublasOperation_t op) { return op == abi::CUBLAS_OP_N ? kTransposes[0] : kTransposes[1]; };
  function(kColMajor, plain(p.trans_a), plain(p.trans_b), static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), alpha, static_cast<const T*>(p.a), static_cast<int>(p.lda),
           static_cast<const T*>(p.b), static_cast<int>(p.ldb), beta, static_cast<T*>(p.c), static_cast<int>(p.ldc));
}

template <typename T>
void call_complex(ComplexGemm function, const Product& p, T alpha, T beta) {
  function(kColMajor, kTransposes[p.trans_a], kTransposes[p.trans_b], static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), &alpha, p.a, static_cast<int>(p.lda), p.b, static_cast<int>(p.ldb), &beta, p.c,
           static_cast<int>(p.ldc));
}

void call_mixed(MixedGemm function, const Product& p, float alpha, float beta) {
  const auto plain = [](cublasOperation_t op) { return op == abi::CUBLAS_OP_N ? kTransposes[0] : kTransposes[1]; };
  function(kColMajor, plain(p.trans_a), plain(p.trans_b), static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), alpha, static_cast<const uint16_t*>(p.a), static_cast<int>(p.lda),
           static_cast<const uint16_t*>(p.b), static_cast<int>(p.ldb), beta, static_cast<float*>(p.c),
           static_cast<int>(p.ldc));
}

// OpenBLAS 0.3.34 takes another kernel for small single-precision products (m n k up to 1e6), and the one for two
// transposed operands is not safe on two threads at once: it crashes, or mixes up their operands (seen on a processor
// with AVX-512; tests/cpp/hostmp_blas.cc). Tiles of that size take microseconds, so they take turns.
std::mutex small_tt_mutex;
constexpr int64_t kSmallTt = 2'000'000;

const Libraries& libraries() { return *loaded.load(std::memory_order_acquire); }

MixedGemm mixed_gemm(abi::cudaDataType_t type) { return type == abi::CUDA_R_16BF ? libraries().bf16 : libraries().f16; }

}  // namespace

Status load_blas(const char* blas_path, const char* mkl_path) {
  std::lock_guard<std::mutex> lock(load_mutex);
  if (blas_is_loaded()) return {};
  if (!blas_path) return InvalidArgument("jaxmp: load_blas: blas_path is null; pass the library of scipy-openblas32");
  auto opened = std::make_unique<Libraries>();
  JAXMP_RETURN_IF_ERROR(load_cblas(blas_path, opened.get()));
  if (mkl_path && *mkl_path) JAXMP_RETURN_IF_ERROR(load_mkl(mkl_path, opened.get()));
  loaded.store(opened.release(), std::memory_order_release);
  return {};
}

bool blas_is_loaded() { return loaded.load(std::memory_order_acquire) != nullptr; }

bool blas_is_openblas() { return blas_is_loaded() && !libraries().names.config.empty(); }

BlasLibraries blas_libraries() { return blas_is_loaded() ? libraries().names : BlasLibraries{}; }

bool mkl_has_gemm(abi::cudaDataType_t type) { return blas_is_loaded() && mixed_gemm(type) != nullptr; }

void mkl_gemm(abi::cudaDataType_t type, const Product& p, float alpha, float beta) {
  call_mixed(mixed_gemm(type), p, alpha, beta);
}

void gemm(const Product& p, float alpha, float beta) {
  const bool is_tt = p.trans_a != abi::CUBLAS_OP_N && p.trans_b != abi::CUBLAS_OP_N;
  std::unique_lock<std::mutex> lock(small_tt_mutex, std::defer_lock);
  if (is_tt && p.m * p.n * p.k <= kSmallTt) lock.lock();
  call_real(libraries().sgemm, p, alpha, beta);
}
void gemm(const Product& p, double alpha, double beta) { call_real(libraries().dgemm, p, alpha, beta); }
void gemm(const Product& p, Complex64 alpha, Complex64 beta) { call_complex(libraries().cgemm, p, alpha, beta); }
void gemm(const Product& p, Complex128 alpha, Complex128 beta) { call_complex(libraries().zgemm, p, alpha, beta); }

}  // namespace jaxmp::hostmp
