// The entry points of the CUDA kernels, without torch: each returns 0 or a cudaError_t. Nothing waits for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

// Increments the step counts and updates all slabs, unless *skip is not 0. gscale and skip may be null.
int cuda_step(int rule, const Slab* slabs, int64_t count, Types types, Settings settings, const float* gscale,
              const float* skip, void* stream);

// The number of partial sums for which cuda_squares needs room.
int64_t cuda_chunks(const int64_t* sizes, int64_t count);

// Writes the sum of squares of the slabs' g to *out, in an order that depends only on the sizes. types: those of g.
int cuda_squares(const Slab* slabs, const int* types, int64_t count, double* partial, double* out, void* stream);

int cuda_coefficients(const double* norm_sq, const float* loss_scale, double max_norm, double eps, float* norm,
                      float* gscale, float* found_inf, void* stream);

// p = g * *scale for each slab, of these dtypes; scale may be null.
int cuda_cast(const Slab* slabs, const int* to, const int* from, int64_t count, const float* scale, void* stream);

// Splits aux (fp32) into p and m (the remainder), or merges them.
int cuda_split(const Slab* slabs, int64_t count, void* stream);
int cuda_merge(const Slab* slabs, int64_t count, void* stream);

}  // namespace modelcenter
