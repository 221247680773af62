// The entry points of column sums, without torch: each returns 0 or a cudaError_t. Sums are in fp32, in an order that
// depends only on the sizes and the GPU. Nothing waits for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

// A matrix of this type, whose rows are `stride` elements apart.
struct Columns {
  const void* x;
  int type;
  int64_t rows, n, stride;
};

// The size, in numbers, of the room for the sums.
int64_t cuda_column_sums_room(const Columns& of);

int cuda_column_sums(const Columns& of, void* out, float* room, void* stream);

}  // namespace modelcenter
