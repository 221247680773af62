// The entry point of csrc/cuda/loss.cu, without torch. Returns 0 or a cudaError_t, and does not wait for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

// loss[row] = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean(x)), in fp32, for rows of `classes` logits x of
// this type, `stride` elements apart. With `train`, its gradient, times scale / *count, overwrites the logits. count
// may be null: 1.
int cuda_cross_entropy(void* x, int type, int64_t stride, const int64_t* target, float* loss, int64_t rows,
                       int64_t classes, const float* count, float scale, float smoothing, bool train, void* stream);

}  // namespace modelcenter
