// The CUDA binding for tensors on a CPU: it takes the place of the CPU operators in the process that loads it.
#include <torch/csrc/stable/accelerator.h>

#include "core/arguments.h"

namespace torch::stable::accelerator {
struct NoGuard {  // there is one device
  explicit NoGuard(int) {}
};
}  // namespace torch::stable::accelerator

#define DeviceGuard NoGuard
#define CUDA CPU
#include "cuda/bind.cpp"
