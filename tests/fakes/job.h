// Common memory of the processes of a job. FAKE_CUDA_JOB names a file, which all of them map to the same addresses: a
// pointer of one process means the same in every other. Without that name a process is alone.
#ifndef JAXMP_TESTS_FAKES_JOB_H_
#define JAXMP_TESTS_FAKES_JOB_H_

#include <cstddef>

namespace fakes {

// Zeros at first, and the same for all processes of the job.
void* Board();

// Memory that every process of the job reads and writes, on a multiple of 256 bytes. The process that took it gives it
// back.
char* Take(size_t bytes);
void GiveBack(char* data, size_t bytes);

}  // namespace fakes

#endif  // JAXMP_TESTS_FAKES_JOB_H_
