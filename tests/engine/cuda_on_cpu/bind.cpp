// The CUDA binding for tensors on a CPU: it takes the place of the CPU operators in the process that loads it.
#include <torch/csrc/stable/accelerator.h>

#include "core/arguments.h"
#include "cuda_runtime.h"

namespace torch::stable::accelerator {
struct Guard {
  explicit Guard(int) { cuda_on_cpu::guards++; }
  ~Guard() { cuda_on_cpu::guards--; }
};
}  // namespace torch::stable::accelerator

#define DeviceGuard Guard
#define CUDA CPU
#include "cuda/bind.cpp"
