# Compiles for 64-bit ARM on another Linux machine, and runs the tests under qemu's user-mode emulation:
# .ci/aarch64, which names the packages.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# Without SME, like the servers that have NVIDIA's GPUs: OpenBLAS 0.3.34's sgemm with it is wrong under qemu 7.2.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu max,sme=off)
# Programs are this machine's (the Python that runs the build); libraries are ARM's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
