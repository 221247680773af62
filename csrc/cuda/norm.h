// The entries of the norms' kernels, without torch: each returns 0 or a cudaError_t. All numbers are added up in fp32, in
// an order that depends on the sizes and the GPU alone. Nothing here waits for the device.
#pragma once
#include "../core/norm.h"

namespace modelcenter {

constexpr int64_t kLongestRow = 8192;  // that a norm takes: a block of threads holds one in registers

int cuda_norm(const NormJob& job, void* stream);

// How many numbers of room the gradients of weight and bias need; 0 where there are no rows.
int64_t cuda_norm_room(const NormBackwardJob& job);

int cuda_norm_backward(const NormBackwardJob& job, float* room, void* stream);

}  // namespace modelcenter
