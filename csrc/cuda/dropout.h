// Dropout on CUDA, without torch: it returns 0 or a cudaError_t, and does not wait for the device.
#pragma once
#include <stdint.h>

#include "../core/random.h"

namespace modelcenter {

// out = residual + dropout(x), all (rows, channels) of this type; residual may be null.
int cuda_dropout(const Draw& draw, const void* x, const void* residual, void* out, int type, int64_t rows,
                 int64_t channels, void* stream);

}  // namespace modelcenter
