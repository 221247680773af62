// Activations of feed-forward networks, alone or multiplied by a second matrix, and their gradients: a part of
// cpu/kernels.cpp, compiled for each instruction set.
//
// Each except ReLU is x times a share: one exponential function and one division, in loops that compilers vectorise.
#pragma once

#include "../core/activation.h"
#include "convert.h"
#include "lanes.h"

namespace modelcenter {
namespace {

constexpr float kGeluA = 1.5957691216057308f, kGeluB = 0.07135481282963639f;  // 2 sqrt(2 / pi), and times 0.044715
constexpr float kDensity = 0.3989422804014327f;                               // 1 / sqrt(2 pi)

// The standard normal cumulative distribution function; exponential: e^(-x^2 / 2). The tail above |x| is that times a
// smooth factor: t times a polynomial of t = 1 / (1 + 0.35 |x|), as in Abramowitz and Stegun 7.1.26, fitted to minimise
// the largest relative error of the tail, 3e-8; in fp32 4e-7. torch loses all digits of it below -5.
MC_INLINE float normal_below(float x, float& exponential_of_it) {
  const float square = x * x, size = x < 0.0f ? -x : x, t = 1.0f / multiply_add<true>(0.35f, size, 1.0f);
  const float e = exponential<true>(-0.5f * square, 0.0f);
  exponential_of_it = square > 174.0f ? 0.0f : e;  // there the exponential function stays at its minimum
  float p = -0.0291459275f;
  p = multiply_add<true>(p, t, 0.143971684f);
  p = multiply_add<true>(p, t, -0.255714225f);
  p = multiply_add<true>(p, t, 0.159174127f);
  p = multiply_add<true>(p, t, -0.0231098122f);
  p = multiply_add<true>(p, t, 0.105507995f);
  p = multiply_add<true>(p, t, 0.11983287f);
  p = multiply_add<true>(p, t, 0.139861869f);
  p = multiply_add<true>(p, t, 0.139621404f);
  const float above = (p * t) * exponential_of_it;
  return x < 0.0f ? above : 1.0f - above;
}

// The activation of x.
template <int kKind>
MC_INLINE float activated(float x) {
  if (kKind == kRelu) return x <= 0.0f ? 0.0f : x;  // a NaN stays
  if (kKind == kGelu) {
    float density;
    return x * normal_below(x, density);
  }
  return x / (1.0f + exponential<true>(kKind == kSilu ? -x : -x * (kGeluA + kGeluB * (x * x)), 89.0f));
}

// Its derivative at x. value: the activation of x.
template <int kKind>
MC_INLINE float slope_at(float x, float& value) {
  if (kKind == kRelu) {
    value = activated<kRelu>(x);
    return x <= 0.0f ? 0.0f : 1.0f;
  }
  if (kKind == kGelu) {
    float density;
    const float below = normal_below(x, density);
    value = x * below;
    return below + x * (density * kDensity);
  }
  const float square = x * x, inner = kKind == kSilu ? x : x * (kGeluA + kGeluB * square);
  const float e = exponential<true>(-inner, 88.0f), s = 1.0f / (1.0f + e);
  const float steep = kKind == kSilu ? x : x * (kGeluA + 3.0f * kGeluB * square);
  value = x * s;
  return s + (s * steep) * (e * s);
}

template <int kKind>
void activate(const ActivationJob& job, int64_t begin, int64_t end) {
  const float* __restrict x = (const float*)job.x + begin;
  const float* __restrict up = job.up ? (const float*)job.up + begin : nullptr;
  float* __restrict out = (float*)job.out + begin;
  in_strips(end - begin, [=](int64_t from, int64_t to) {
    ask_ahead(x + from, kStrip);
    if (!up) {
      for (int64_t i = from; i < to; i++) out[i] = activated<kKind>(x[i]);
      return;
    }
    ask_ahead(up + from, kStrip);
    for (int64_t i = from; i < to; i++) out[i] = activated<kKind>(x[i]) * up[i];
  });
}

template <int kKind>
void activate_backward(const ActivationJob& job, int64_t begin, int64_t end) {
  const float* __restrict x = (const float*)job.x + begin;
  const float* __restrict up = job.up ? (const float*)job.up + begin : nullptr;
  const float* __restrict grad = (const float*)job.grad + begin;
  float* __restrict dx = (float*)job.dx + begin;
  float* __restrict dup = job.dup ? (float*)job.dup + begin : nullptr;
  in_strips(end - begin, [=](int64_t from, int64_t to) {
    ask_ahead(x + from, kStrip);
    ask_ahead(grad + from, kStrip);
    if (!up) {
      for (int64_t i = from; i < to; i++) {
        float value;
        dx[i] = grad[i] * slope_at<kKind>(x[i], value);
      }
      return;
    }
    ask_ahead(up + from, kStrip);
    for (int64_t i = from; i < to; i++) {
      float value;
      dx[i] = (grad[i] * up[i]) * slope_at<kKind>(x[i], value);
      dup[i] = grad[i] * value;
    }
  });
}

// Elements [begin, end) of the flattened matrix.
void activation(const ActivationJob& job, int64_t begin, int64_t end) {
  constexpr decltype(&activate<kGelu>) kOf[] = {activate<kGelu>, activate<kGeluTanh>, activate<kSilu>, activate<kRelu>};
  kOf[job.kind](job, begin, end);
}

void activation_backward(const ActivationJob& job, int64_t begin, int64_t end) {
  constexpr decltype(&activate_backward<kGelu>) kOf[] = {activate_backward<kGelu>, activate_backward<kGeluTanh>,
                                                         activate_backward<kSilu>, activate_backward<kRelu>};
  kOf[job.kind](job, begin, end);
}

}  // namespace
}  // namespace modelcenter
