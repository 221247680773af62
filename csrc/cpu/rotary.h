// Rotary positions; part of cpu/kernels.cpp, compiled for each instruction set. Products and sums are those of torch's
// operators, in their order, and so are the bits.
#pragma once

#include "../core/rotary.h"
#include "lanes.h"

namespace modelcenter {
namespace {

template <bool kInterleaved>
MC_INLINE void turn_heads(const Rotation& r, const Heads& of, int64_t token, const float* __restrict cos,
                          const float* __restrict sin) {
  const float* __restrict x = (const float*)of.x + token * of.stride;
  float* __restrict out = (float*)of.out + token * of.count * r.head_dim;
  const int64_t half = r.half;
  for (int64_t head = 0; head < of.count; head++, x += r.head_dim, out += r.head_dim) {
    for (int64_t i = 0; i < half; i++) {
      const int64_t first = kInterleaved ? 2 * i : i, second = kInterleaved ? first + 1 : i + half;
      const float a = x[first], b = x[second];
      out[first] = a * cos[i] - b * sin[i];
      out[second] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = 2 * half; i < r.head_dim; i++) out[i] = x[i];
  }
}

// The heads of tokens [begin, end). by: room for `half` numbers.
template <bool kInterleaved>
MC_INLINE void turn_tokens(const Rotation& r, int64_t begin, int64_t end, float* __restrict by) {
  const float sign = r.back ? -1.0f : 1.0f;
  for (int64_t token = begin; token < end; token++) {
    const float *cos = (const float*)r.cos + token * r.half, *sin = (const float*)r.sin + token * r.half;
    for (int64_t i = 0; i < r.half; i++) by[i] = sin[i] * sign;
    turn_heads<kInterleaved>(r, r.q, token, cos, by);
    turn_heads<kInterleaved>(r, r.k, token, cos, by);
  }
}

void rotate(const Rotation& r, int64_t begin, int64_t end, float* by) {
  if (r.interleaved) turn_tokens<true>(r, begin, end, by);
  else turn_tokens<false>(r, begin, end, by);
}

}  // namespace
}  // namespace modelcenter
