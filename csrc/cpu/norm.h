// The norm of rows by their root mean square, a part of cpu/kernels.cpp, compiled for each instruction set.
#pragma once

#include "lanes.h"

namespace modelcenter {
namespace {

// out = x * factor * w for rows of n numbers, with factor = 1 / sqrt(mean(x^2) + eps) of each row.
void rms_norm(const float* __restrict x, const float* __restrict w, float* __restrict out, float* __restrict factor,
              int64_t rows, int64_t n, float eps) {
  for (int64_t row = 0; row < rows; row++, x += n, out += n) {
    const float mean = row_sum(n, [&](int64_t i) { return x[i] * x[i]; }) / (float)n;
    const float f = factor[row] = 1.0f / __builtin_sqrtf(mean + eps);
    for (int64_t i = 0; i < n; i++) out[i] = (x[i] * f) * w[i];
  }
}

// What `grad` of out is of x and, added to dw where that is not null, of w.
void rms_norm_backward(const float* __restrict grad, const float* __restrict x, const float* __restrict w,
                       const float* __restrict factor, float* __restrict dx, float* __restrict dw, int64_t rows,
                       int64_t n) {
  for (int64_t row = 0; row < rows; row++, grad += n, x += n, dx += n) {
    const float f = factor[row];
    const float along = row_sum(n, [&](int64_t i) { return (grad[i] * w[i]) * x[i]; }) * (f * f * f) / (float)n;
    for (int64_t i = 0; i < n; i++) dx[i] = (grad[i] * w[i]) * f - x[i] * along;
    if (dw)
      for (int64_t i = 0; i < n; i++) dw[i] += grad[i] * (x[i] * f);
  }
}

}  // namespace
}  // namespace modelcenter
