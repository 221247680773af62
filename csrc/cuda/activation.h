// The entries of the activations of feed-forward networks, without torch: each returns 0 or a cudaError_t. All numbers
// are added up in fp32, in an order that depends on the sizes and the GPU alone. Nothing here waits for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

enum Activation : int { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kActivations = 4 };

// All are (rows, n), contiguous and of one type.
struct ActivationJob {
  int type, kind;
  int64_t rows, n;
  const void *x, *up;  // up: what multiplies the activation of x; null: nothing
  void* out;           // of forward
  const void* grad;    // of backward, with the gradients of x and up
  void *dx, *dup;
};

int cuda_activation(const ActivationJob& job, void* stream);

// How many numbers of room the sums of dx need. There are columns.
int64_t cuda_activation_room(const ActivationJob& job);

// sums: (n,), those of the rows of dx; null: they are not wanted, and there is no room.
int cuda_activation_backward(const ActivationJob& job, void* sums, float* room, void* stream);

}  // namespace modelcenter
