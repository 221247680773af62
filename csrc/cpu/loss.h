// Cross-entropy of rows of logits; part of cpu/kernels.cpp, compiled for each instruction set.
#pragma once

#include "lanes.h"

namespace modelcenter {
namespace {

constexpr int64_t kPiece = 2048;  // numbers that are summed in fp32

template <class Term>
MC_INLINE double long_sum(int64_t n, const Term& term) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; i += kPiece)
    sum += row_sum(n - i < kPiece ? n - i : kPiece, [&](int64_t k) { return term(i + k); });
  return sum;
}

// loss[row] = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean(x)) for rows of n logits x, with lse the
// logarithm of the sum of their exponentials. With `train`, its gradient, times scale, overwrites the logits.
void cross_entropy(float* __restrict x, int64_t stride, const int64_t* __restrict target, float* __restrict loss,
                   int64_t rows, int64_t n, float scale, float smoothing, bool train) {
  for (int64_t row = 0; row < rows; row++, x += stride) {
    const float most = row_max(x, n, -__builtin_inff()), at = x[target[row]];
    const double mean = smoothing == 0.0f ? 0.0 : long_sum(n, [&](int64_t i) { return x[i]; }) / (double)n;
    double sum = 0.0;
    if (train) {
      for (int64_t i = 0; i < n; i++) x[i] = exponential(x[i] - most, 0.0f);
      sum = long_sum(n, [&](int64_t i) { return x[i]; });
    } else {
      sum = long_sum(n, [&](int64_t i) { return exponential(x[i] - most, 0.0f); });
    }
    const double lse = (double)most + __builtin_log(sum);
    loss[row] = (float)((1.0 - (double)smoothing) * (lse - (double)at) + (double)smoothing * (lse - mean));
    if (!train) continue;
    const float share = (float)((double)scale / sum), least = smoothing * scale / (float)n;
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * share - least;
    x[target[row]] -= (1.0f - smoothing) * scale;
  }
}

}  // namespace
}  // namespace modelcenter
