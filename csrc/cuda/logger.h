// What cuBLASMp says about itself: which algorithm it took, and why a call failed.
#ifndef JAXMP_CUDA_LOGGER_H_
#define JAXMP_CUDA_LOGGER_H_

#include <string>
#include <vector>

namespace jaxmp::cuda {

// Has the library report everything to this process, with lines such as "[cublasMpMatmul] Using AllGather + Matmul";
// off: errors alone, which complete the messages of failed calls. Either overrides CUBLASMP_LOG_LEVEL and
// CUBLASMP_LOG_FILE: without that every line would stand on stdout as well. May be called before the library is loaded.
void SetLogging(bool is_on);

// Tells a library that was just loaded.
struct Libraries;
void ApplyLogging(const Libraries& libraries);

// The lines since the last call, oldest first; the newest 4096 of them.
std::vector<std::string> TakeLog();

// The errors that the library reported on this thread since the last time, in one line; "" where it reported none. A
// failed call may report several, the cause first. Valid until the next call.
const char* TakeLastError();

}  // namespace jaxmp::cuda

#endif  // JAXMP_CUDA_LOGGER_H_
