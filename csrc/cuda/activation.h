// The entries of the activations of feed-forward networks, without torch: each returns 0 or a cudaError_t. All numbers
// are added up in fp32, in an order that depends on the sizes and the GPU alone. Nothing here waits for the device.
#pragma once
#include <stdint.h>

#include "../core/activation.h"

namespace modelcenter {

int cuda_activation(const ActivationJob& job, void* stream);

// How many numbers of room the sums of dx need. There are columns.
int64_t cuda_activation_room(const ActivationJob& job);

// sums: (n,), those of the rows of dx; null: they are not wanted, and there is no room.
int cuda_activation_backward(const ActivationJob& job, void* sums, float* room, void* stream);

}  // namespace modelcenter
