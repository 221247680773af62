// The jobs of norms of rows, without torch; the same for CPU and CUDA.
#pragma once
#include "job.h"
#include "random.h"

namespace modelcenter {

// For rows of n elements: sum = x + dropout(branch), rounded to their type, and out = (sum - mean) * rstd * weight +
// bias. Without a bias out = round(sum * rstd) * weight, with rstd = 1 / sqrt(mean(sum^2) + eps). Without a branch the
// sum is x, and is not written.
struct NormJob {
  int type;
  int64_t rows, n;
  float eps;
  Draw draw;
  const void *x, *branch, *weight, *bias;
  void *sum, *out;
  float* stats;  // the rows' means, if there is a bias, then their rstds
};

// The gradients of x, the branch, the weight and the bias for `grad`, that of out.
struct NormBackwardJob {
  int type;
  int64_t rows, n;
  bool centered;
  Draw draw;
  const void *grad, *extra;  // extra, which may be null, is added to the gradient of out,
  bool extra_of_sum;         // or to that of the sum
  const void *sum, *weight;
  const float* stats;
  void *dx, *dbranch;  // dbranch: null if it equals dx, as nothing was dropped, or if there is no branch
  void *dweight, *dbias;  // null if they are not wanted; dbias also unless centered
};

}  // namespace modelcenter
