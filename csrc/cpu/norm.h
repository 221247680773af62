// Norms of rows, after the addition of a branch; part of cpu/kernels.cpp, compiled for each instruction set.
#pragma once

#include "../core/norm.h"
#include "dropout.h"
#include "lanes.h"

namespace modelcenter {
namespace {

template <bool kCentered>
void norm_rows(const NormJob& job, int64_t begin, int64_t end) {
  const int64_t n = job.n;
  const float *const __restrict w = (const float*)job.weight, *const __restrict b = (const float*)job.bias;
  for (int64_t row = begin; row < end; row++) {
    const float* __restrict x = (const float*)job.x + row * n;
    float* const __restrict out = (float*)job.out + row * n;
    if (!job.branch || !kAmd) ask_for(x + n, 4 * n);
    if (job.branch) {
      const float* const __restrict branch = (const float*)job.branch + row * n;
      if (!kAmd) ask_for(branch + n, 4 * n);
      float* const __restrict sum = (float*)job.sum + row * n;
      if (job.draw.threshold) dropout(job.draw, row, branch, x, sum, kFloat, 0, n);
      else
        for (int64_t i = 0; i < n; i++) sum[i] = x[i] + branch[i];
      x = sum;
    }
    float mean = 0.0f;
    if constexpr (kCentered) {
      mean = job.stats[row] = row_sum(n, [&](int64_t i) { return x[i]; }) / (float)n;
      const float square = row_sum(n, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / (float)n;
      const float rstd = job.stats[job.rows + row] = 1.0f / __builtin_sqrtf(square + job.eps);
      for (int64_t i = 0; i < n; i++) out[i] = ((x[i] - mean) * rstd) * w[i] + b[i];
    } else {
      const float square = row_sum(n, [&](int64_t i) { return x[i] * x[i]; }) / (float)n;
      const float rstd = job.stats[row] = 1.0f / __builtin_sqrtf(square + job.eps);
      for (int64_t i = 0; i < n; i++) out[i] = (x[i] * rstd) * w[i];
    }
  }
}

void norm(const NormJob& job, int64_t begin, int64_t end) {
  job.bias ? norm_rows<true>(job, begin, end) : norm_rows<false>(job, begin, end);
}

enum Extra : int { kNone, kOfOut, kOfSum };

// Adds to dweight and dbias, unless dweight is null.
template <bool kCentered, Extra kExtra>
void norm_rows_backward(const NormBackwardJob& job, float* __restrict dweight, float* __restrict dbias, int64_t begin,
                        int64_t end) {
  const int64_t n = job.n;
  const float* const __restrict w = (const float*)job.weight;
  for (int64_t row = begin; row < end; row++) {
    const float* const __restrict x = (const float*)job.sum + row * n;
    const float* const __restrict grad = (const float*)job.grad + row * n;
    const float* const __restrict extra = kExtra == kNone ? nullptr : (const float*)job.extra + row * n;
    float* const __restrict dx = (float*)job.dx + row * n;
    if (!kAmd) {
      ask_for(x + n, 4 * n), ask_for(grad + n, 4 * n);
      if (kExtra != kNone) ask_for(extra + n, 4 * n);
    }
    const float mean = kCentered ? job.stats[row] : 0.0f, rstd = job.stats[(kCentered ? job.rows : 0) + row];
    const auto g = [&](int64_t i) { return kExtra == kOfOut ? grad[i] + extra[i] : grad[i]; };
    const auto normal = [&](int64_t i) { return kCentered ? (x[i] - mean) * rstd : x[i] * rstd; };
    const float slope = row_sum(n, [&](int64_t i) { return (g(i) * w[i]) * normal(i); }) / (float)n;
    float shift = 0.0f;
    if constexpr (kCentered) shift = row_sum(n, [&](int64_t i) { return g(i) * w[i]; }) / (float)n;
    for (int64_t i = 0; i < n; i++) {
      const float along = kCentered ? normal(i) * slope + shift : normal(i) * slope;
      const float of_norm = rstd * (g(i) * w[i] - along);
      dx[i] = kExtra == kOfSum ? of_norm + extra[i] : of_norm;
    }
    if (dweight)
      for (int64_t i = 0; i < n; i++) dweight[i] += g(i) * normal(i);
    if (kCentered && dweight)
      for (int64_t i = 0; i < n; i++) dbias[i] += g(i);
    if (job.dbranch) dropout(job.draw, row, dx, nullptr, (float*)job.dbranch + row * n, kFloat, 0, n);
  }
}

template <bool kCentered>
void norm_rows_backward(const NormBackwardJob& job, float* dweight, float* dbias, int64_t begin, int64_t end) {
  const Extra extra = !job.extra ? kNone : job.extra_of_sum ? kOfSum : kOfOut;
  const auto run = extra == kNone ? norm_rows_backward<kCentered, kNone>
                   : extra == kOfSum ? norm_rows_backward<kCentered, kOfSum>
                                     : norm_rows_backward<kCentered, kOfOut>;
  run(job, dweight, dbias, begin, end);
}

void norm_backward(const NormBackwardJob& job, float* dweight, float* dbias, int64_t begin, int64_t end) {
  job.centered ? norm_rows_backward<true>(job, dweight, dbias, begin, end)
               : norm_rows_backward<false>(job, dweight, dbias, begin, end);
}

}  // namespace
}  // namespace modelcenter
