// GELU by its tanh approximation, a part of cpu/kernels.cpp, compiled for each instruction set.
//
// x / 2 (1 + tanh u) is x / (1 + e^-2u): one exponential function and one division, in loops that become vectors.
#pragma once

#include "convert.h"
#include "lanes.h"

namespace modelcenter {
namespace {

constexpr float kGeluA = 1.5957691216057308f, kGeluB = 0.07135481282963639f;  // 2 sqrt(2 / pi), and times 0.044715

// n elements of gelu(x) or, where grad is not null, of grad times the slope at x.
void gelu(const float* __restrict x, const float* __restrict grad, float* __restrict out, int64_t n) {
  in_strips(n, [=](int64_t from, int64_t to) {
    ask_ahead(x + from, kStrip);
    if (!grad) {
      for (int64_t i = from; i < to; i++)
        out[i] = x[i] / (1.0f + exponential(-x[i] * (kGeluA + kGeluB * (x[i] * x[i])), 89.0f));
      return;
    }
    ask_ahead(grad + from, kStrip);
    for (int64_t i = from; i < to; i++) {
      const float square = x[i] * x[i], e = exponential(-x[i] * (kGeluA + kGeluB * square), 88.0f);
      const float s = 1.0f / (1.0f + e), steep = x[i] * (kGeluA + 3.0f * kGeluB * square);
      out[i] = grad[i] * (s + (s * steep) * (e * s));
    }
  });
}

}  // namespace
}  // namespace modelcenter
