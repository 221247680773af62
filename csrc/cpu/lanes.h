// Shared by kernels over rows: loops that compilers vectorise; part of cpu/kernels.cpp, compiled for each instruction
// set.
#pragma once
#include "../core/numbers.h"

namespace modelcenter {
namespace {

typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));

// The same pointer, opaque to the compiler, which would otherwise turn loops of moves into calls of memcpy.
template <class T>
MC_INLINE T* unknown(T* p) {
  asm("" : "+r"(p));
  return p;
}

// Writes zeros to a few numbers, a multiple of 16: memset as compiled starts slowly.
MC_INLINE void clear(float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) *(Sixteen*)unknown(to + i) = Sixteen{};
}

// a * b + c, rounded once or twice.
template <bool kFused>
MC_INLINE float multiply_add(float a, float b, float c) {
  return kFused ? __builtin_fmaf(a, b, c) : a * b + c;
}

// e^y to about an ulp, with y clamped to between -87 and `most`: 88, or 89, with infinity above 88.4. The polynomial is
// that of Cephes' expf.
template <bool kFused = false>
MC_INLINE float exponential(float y, float most) {
  y = y < -87.0f ? -87.0f : y;  // a NaN stays
  y = y > most ? most : y;
  const float shifted = multiply_add<kFused>(y, 1.44269504f, 12582912.0f);  // rounds to the nearest integer
  const float n = shifted - 12582912.0f;
  const float r = multiply_add<kFused>(n, 2.12194440e-4f, multiply_add<kFused>(n, -0.693359375f, y));
  float p = 1.9875691500e-4f;
  p = multiply_add<kFused>(p, r, 1.3981999507e-3f);
  p = multiply_add<kFused>(p, r, 8.3334519073e-3f);
  p = multiply_add<kFused>(p, r, 4.1665795894e-2f);
  p = multiply_add<kFused>(p, r, 1.6666665459e-1f);
  p = multiply_add<kFused>(p, r, 5.0000001201e-1f);
  return (multiply_add<kFused>(p * r, r, r) + 1.0f) * float_of((bits_of(shifted) << 23) + (127u << 23));
}

// A sum over a row consists of this many sums, each of every kLanes-th number, so that loops can be vectorised, in the
// same order on every instruction set.
constexpr int64_t kLanes = 64;

template <class Term>
MC_INLINE float row_sum(int64_t n, const Term& term) {
  alignas(64) float lanes[kLanes];
  clear(lanes, kLanes);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; k++) lanes[k] += term(i + k);
  for (int64_t k = 0; i + k < n; k++) lanes[k] += term(i + k);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t k = 0; k < half; k++) lanes[k] += lanes[half + k];
  return lanes[0];
}

// The largest of n numbers and `least`; NaNs are ignored.
MC_INLINE float row_max(const float* __restrict x, int64_t n, float least) {
  alignas(64) float lanes[kLanes];
  for (int64_t k = 0; k < kLanes; k++) lanes[k] = least;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; k++) lanes[k] = x[i + k] > lanes[k] ? x[i + k] : lanes[k];
  for (int64_t k = 0; i + k < n; k++) lanes[k] = x[i + k] > lanes[k] ? x[i + k] : lanes[k];
  float most = least;
  for (int64_t k = 0; k < kLanes; k++) most = lanes[k] > most ? lanes[k] : most;
  return most;
}

}  // namespace
}  // namespace modelcenter
