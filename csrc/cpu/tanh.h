// tanh; part of cpu/kernels.cpp, compiled for each instruction set.
//
// One exponential function and one division, in loops that compilers vectorise, as in GELU. Near 0, where 1 - 2 / (e^2u
// + 1) loses most of its digits, it is the polynomial of Cephes' tanhf; most scores are there, since caps are large
// compared with them. Both are computed, and one is chosen.
#pragma once
#include "lanes.h"

namespace modelcenter {
namespace {

// tanh u to about two ulps; a NaN stays.
MC_INLINE float tangent(float u) {
  const float square = u * u;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const float near = p * square * u + u, far = 1.0f - 2.0f / (exponential(2.0f * u, 88.0f) + 1.0f);
  return square < 0.390625f ? near : far;  // |u| < 0.625
}

}  // namespace
}  // namespace modelcenter
