// The activations of feed-forward networks, without torch: the same for CPU and CUDA.
#pragma once
#include <stdint.h>

#include "job.h"

namespace modelcenter {

enum Activation : int { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kActivations = 4 };

// All are (rows, n), contiguous and of one type.
struct ActivationJob {
  int type, kind;
  int64_t rows, n;
  const void *x, *up;  // up: factor of the activation of x; null: none
  void* out;           // of forward
  const void* grad;    // of backward, with the gradients of x and up
  void *dx, *dup;
};

}  // namespace modelcenter
