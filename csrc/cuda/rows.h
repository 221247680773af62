// The entries of the kernels over the rows of a matrix, without torch: each returns 0 or a cudaError_t. All numbers are
// added up in fp32, in an order that depends on the sizes and the GPU alone. Nothing here waits for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

constexpr int64_t kLongestRow = 8192;  // that a norm takes: a block of threads holds one in registers

// Rows of n numbers of this type, one behind the other. aligned: all rows that a call reads and writes, weight and bias
// begin at multiples of 16 bytes, and n is a multiple of 8.
struct RowsOf {
  int type;
  int64_t rows, n;
  bool aligned;
};

// out = (x - mean) * rstd * weight + bias of each row, and stats = the rows' means, then their rstds. Without a bias
// out = x * rstd, rounded, * weight, with rstd = 1 / sqrt(mean(x^2) + eps), and stats = the rstds.
int cuda_norm(const RowsOf& of, const void* x, const void* weight, const void* bias, void* out, float* stats, float eps,
              void* stream);

// How many numbers of room the gradients of the weight and, if centered, the bias need; 0 where there are no rows.
int64_t cuda_norm_room(const RowsOf& of, bool centered);

// What `grad` of out is of x, the weight and the bias. dweight is null where only dx is wanted; dbias not, if centered.
int cuda_norm_backward(const RowsOf& of, bool centered, const void* grad, const void* x, const void* weight,
                       const float* stats, void* dx, void* dweight, void* dbias, float* room, void* stream);

int64_t cuda_column_sums_room(const RowsOf& of);

// out (n,) = the sums of the columns of x, whose rows are `stride` numbers apart.
int cuda_column_sums(const RowsOf& of, const void* x, int64_t stride, void* out, float* room, void* stream);

}  // namespace modelcenter
