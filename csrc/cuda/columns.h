// The entries of the sums of columns, without torch: 0 or a cudaError_t. All numbers are added up in fp32, in an order
// that depends on the sizes and the GPU alone. Nothing here waits for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

// A matrix of this type, whose rows are `stride` numbers apart.
struct Columns {
  const void* x;
  int type;
  int64_t rows, n, stride;
};

// How many numbers of room the sums need.
int64_t cuda_column_sums_room(const Columns& of);

int cuda_column_sums(const Columns& of, void* out, float* room, void* stream);

}  // namespace modelcenter
