#include "csrc/hostmp/handles/epilog_table.h"

namespace jaxmp::hostmp {
namespace {

constexpr Epilog kEpilogs[] = {
    {abi::CUBLASMP_MATMUL_EPILOGUE_DEFAULT, "DEFAULT", Activation::kNone, false, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_BIAS, "BIAS", Activation::kNone, true, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU, "RELU", Activation::kRelu, false, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU_BIAS, "RELU_BIAS", Activation::kRelu, true, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU_AUX, "RELU_AUX", Activation::kRelu, false, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU_AUX_BIAS, "RELU_AUX_BIAS", Activation::kRelu, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU, "GELU", Activation::kGelu, false, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU_BIAS, "GELU_BIAS", Activation::kGelu, true, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU_AUX, "GELU_AUX", Activation::kGelu, false, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU_AUX_BIAS, "GELU_AUX_BIAS", Activation::kGelu, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DRELU, "DRELU", Activation::kRelu, false, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD, "DRELU_BGRAD", Activation::kRelu, false, true, true, Gradient::kD},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DGELU, "DGELU", Activation::kGelu, false, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DGELU_BGRAD, "DGELU_BGRAD", Activation::kGelu, false, true, true, Gradient::kD},
    {abi::CUBLASMP_MATMUL_EPILOGUE_BGRADA, "BGRADA", Activation::kNone, false, false, false, Gradient::kA},
    {abi::CUBLASMP_MATMUL_EPILOGUE_BGRADB, "BGRADB", Activation::kNone, false, false, false, Gradient::kB},
};

}  // namespace

const Epilog* FindEpilog(int number) {
  for (const Epilog& epilog : kEpilogs) {
    if (epilog.number == number) return &epilog;
  }
  return nullptr;
}

}  // namespace jaxmp::hostmp
