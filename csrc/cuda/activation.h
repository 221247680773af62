// The entry points of the activations of feed-forward networks, without torch: each returns 0 or a cudaError_t. Sums
// are in fp32, in an order that depends only on the sizes and the GPU. Nothing waits for the device.
#pragma once
#include <stdint.h>

#include "../core/activation.h"

namespace modelcenter {

int cuda_activation(const ActivationJob& job, void* stream);

// The size, in numbers, of the room for the sums of dx. There must be columns.
int64_t cuda_activation_room(const ActivationJob& job);

// sums: (n,), dx summed over its rows; null: they are not wanted, and room is null.
int cuda_activation_backward(const ActivationJob& job, void* sums, float* room, void* stream);

}  // namespace modelcenter
