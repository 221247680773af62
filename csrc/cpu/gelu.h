// GELU by its tanh approximation, a part of cpu/kernels.cpp, compiled for each instruction set.
//
// x / 2 (1 + tanh u) is x / (1 + e^-2u): one exponential function and one division, in loops that become vectors.
#pragma once

namespace modelcenter {
namespace {

constexpr float kGeluA = 1.5957691216057308f, kGeluB = 0.07135481282963639f;  // 2 sqrt(2 / pi), and times 0.044715

// e^y to about an ulp, for y between -87 and `most`, 88 or, with infinity for what is above 88.4, 89; what is beyond
// counts as that. The polynomial is that of Cephes' expf.
MC_INLINE float exponential(float y, float most) {
  y = y < -87.0f ? -87.0f : y;  // a NaN stays
  y = y > most ? most : y;
  const float shifted = y * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // to the nearest whole number
  const float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return ((p * r) * r + r + 1.0f) * float_of((bits_of(shifted) << 23) + (127u << 23));
}

// n elements of gelu(x) or, where grad is not null, of grad times the slope at x.
void gelu(const float* __restrict x, const float* __restrict grad, float* __restrict out, int64_t n) {
  if (!grad) {
    for (int64_t i = 0; i < n; i++)
      out[i] = x[i] / (1.0f + exponential(-x[i] * (kGeluA + kGeluB * (x[i] * x[i])), 89.0f));
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    const float square = x[i] * x[i], e = exponential(-x[i] * (kGeluA + kGeluB * square), 88.0f);
    const float s = 1.0f / (1.0f + e), steep = x[i] * (kGeluA + 3.0f * kGeluB * square);
    out[i] = grad[i] * (s + (s * steep) * (e * s));
  }
}

}  // namespace
}  // namespace modelcenter
