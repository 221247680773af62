// The entry points of norms, without torch: each returns 0 or a cudaError_t. Sums are in fp32, in an order that depends
// only on the sizes and the GPU. Nothing waits for the device.
#pragma once
#include "../core/norm.h"

namespace modelcenter {

constexpr int64_t kLongestRow = 8192;  // that a norm takes: a block holds a row in registers

int cuda_norm(const NormJob& job, void* stream);

// The size, in numbers, of the room for the gradients of weight and bias; 0 without rows.
int64_t cuda_norm_room(const NormBackwardJob& job);

int cuda_norm_backward(const NormBackwardJob& job, float* room, void* stream);

}  // namespace modelcenter
