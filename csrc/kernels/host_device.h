// Marks what CUDA kernels and the CPU's passes share.
#pragma once

#ifdef __CUDACC__
#define PD2_HOST_DEVICE __host__ __device__
#else
#define PD2_HOST_DEVICE
#endif
