// hostmp's functions except Matmul, and what they refuse. (Matmul's refusals are cases of tests/conformance.)
#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {
namespace {

void check_refused(cublasMpStatus_t got, cublasMpStatus_t expected, const std::vector<std::string>& parts, int line) {
  const std::string message = api.last_error();
  check::equal<int, int>(got, expected, "status", __FILE__, line);
  for (const std::string& part : parts) check::contains(message, part, __FILE__, line);
}
#define REFUSED(call, status, ...) check_refused(call, CUBLASMP_STATUS_##status, {__VA_ARGS__}, __LINE__)

TEST(test_before_load) {
  CHECK_CONTAINS(hostmp::LoadBlas("/no/such/library.so").message(), "/no/such/library.so");
  CHECK_CONTAINS(hostmp::LoadBlas(nullptr).message(), "blas_path is null");
  const int before = check::failures;
  World world(product(Pattern::kLocal, 1, 8, 8, 8));  // complains, because it asks for the size of its workspace
  check::failures = before;
  hostmp::Stream stream = {&world.rendezvous, 1, 0, nullptr, [](void*, const Status&) {}, nullptr};
  REFUSED(world.matmul(0, &stream), NOT_INITIALIZED, "LoadBlas");
  check::load_blas();
}

TEST(test_streams) {
  World world(product(Pattern::kAllGather, 2, 8, 8, 8));
  REFUSED(world.matmul(0, nullptr), NOT_INITIALIZED, "no stream");
  hostmp::Stream lonely = {nullptr, 1, 0, nullptr, [](void*, const Status&) {}, nullptr};
  REFUSED(world.matmul(0, &lonely), NOT_INITIALIZED, "rendezvous", "2 ranks");
}

TEST(test_grids) {
  hostmp::Group group(4);
  cublasMpGrid_t grid = nullptr;
  const auto create = [&](int64_t p, int64_t q, int layout, ncclComm_t comm) {
    return api.GridCreate(p, q, static_cast<cublasMpGridLayout_t>(layout), comm, &grid);
  };
  REFUSED(create(2, 3, 0, group.comm(0)), INVALID_VALUE, "2x3", "4 ranks");
  REFUSED(create(int64_t{1} << 62, 16, 0, group.comm(0)), INVALID_VALUE, "4611686018427387904x16", "4 ranks");
  REFUSED(create(-2, -2, 0, group.comm(0)), INVALID_VALUE, "-2x-2");
  REFUSED(create(2, 2, 0, nullptr), INVALID_VALUE, "comm is null");
  REFUSED(create(2, 2, 5, group.comm(0)), INVALID_VALUE, "layout 5");
  REFUSED(api.GridDestroy(nullptr), INVALID_VALUE, "grid is null");
  cublasMpMatrixDescriptor_t desc = nullptr;
  REFUSED(api.MatrixDescriptorCreate(8, 8, 4, 8, 0, 0, 4, CUDA_R_32F, nullptr, &desc), INVALID_VALUE, "grid is null");
  World world(product(Pattern::kAllGather, 2, 8, 8, 8)), other(world.c);
  world.calls[0].desc_a = other.calls[0].desc_a;
  hostmp::Stream stream = {&world.rendezvous, 1, 0, nullptr, [](void*, const Status&) {}, nullptr};
  REFUSED(world.matmul(0, &stream), INVALID_VALUE, "grid of A belongs to another communicator");
}

TEST(test_attributes) {
  const World world(product(Pattern::kLocal, 1, 8, 8, 8));
  cublasMpMatmulDescriptor_t desc = world.calls[0].matmul;
  const int64_t value = 0;
  for (int number = -1; number <= 29; ++number) {
    const auto attribute = static_cast<cublasMpMatmulDescriptorAttribute_t>(number);
    const size_t size = AttributeSize(number), wrong = size == 4 ? 8 : 4;
    if (size > 0) check_ok(api.MatmulDescriptorSetAttribute(desc, attribute, &value, size));
    REFUSED(api.MatmulDescriptorSetAttribute(desc, attribute, &value, wrong), INVALID_VALUE,
            "attribute " + std::to_string(number), size ? "sizeInBytes=" + std::to_string(wrong) : "does not exist");
    int64_t read = 0;
    REFUSED(api.MatmulDescriptorGetAttribute(desc, attribute, &read, wrong, nullptr), INVALID_VALUE, "attribute");
  }
  constexpr auto kTransB = CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB;
  REFUSED(api.MatmulDescriptorSetAttribute(desc, kTransB, nullptr, 4), INVALID_VALUE, "buf is null");
  int stored = 1;
  size_t written = 0;
  check_ok(api.MatmulDescriptorSetAttribute(desc, kTransB, &stored, 4));
  stored = 0;
  check_ok(api.MatmulDescriptorGetAttribute(desc, kTransB, &stored, 4, &written));
  CHECK_EQ(stored, 1);
  CHECK_EQ(written, size_t{4});
}

TEST(test_buffers) {
  hostmp::Group group(2);
  cublasMpGrid_t grid = nullptr;
  check_ok(api.GridCreate(2, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR, group.comm(0), &grid));
  void* ptr = nullptr;
  check_ok(api.Malloc(grid, &ptr, 100));
  CHECK_EQ(reinterpret_cast<uintptr_t>(ptr) % 64, uintptr_t{0});
  check_ok(api.Free(grid, ptr));
  REFUSED(api.Malloc(nullptr, &ptr, 1), INVALID_VALUE, "grid is null");
  check_ok(api.GridDestroy(grid));
}

TEST(test_small_calls) {
  int version = 0;
  check_ok(api.GetVersion(&version));
  CHECK_EQ(version, 1000);
  CHECK_EQ(std::string(api.last_error()), "");
  REFUSED(api.GetVersion(nullptr), INVALID_VALUE, "version is null");
  CHECK_EQ(std::string(api.GetStatusString(CUBLASMP_STATUS_NOT_SUPPORTED)), "not supported");
  CHECK_EQ(std::string(api.GetStatusString(static_cast<cublasMpStatus_t>(99))), "unknown status");
  // 10 indices in blocks of 3 over 2 processes: 0 1 2 6 7 8 and 3 4 5 9.
  CHECK_EQ(api.Numroc(10, 3, 0, 0, 2), int64_t{6});
  CHECK_EQ(api.Numroc(10, 3, 1, 0, 2), int64_t{4});
  CHECK_EQ(api.Numroc(10, 3, 0, 1, 2), int64_t{4});
  CHECK_EQ(api.Numroc(10, 0, 0, 0, 2), int64_t{0});
}

}  // namespace
}  // namespace jaxmp::test
