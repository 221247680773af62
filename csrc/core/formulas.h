// The update of each optimizer, written once for the CPU and the CUDA kernels.
//
// Every operation is a single IEEE one, in fp32, in this order: nothing may be contracted to a fused multiply-add
// (-ffp-contract=off, -fmad=false). So all CPUs, vector widths and GPUs give the same bits, and so does a sequence of
// torch operators (engine/ops/reference.py). Denormals are flushed to zero.
#pragma once
#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define MC_INLINE __host__ __device__ __forceinline__
#else
#define MC_INLINE inline __attribute__((always_inline))
#endif

namespace modelcenter {

// The settings of the user, the same for all tensors of a call.
struct Settings {
  double lr, beta1, beta2, eps, weight_decay;
  int flag;  // SGD: Nesterov
};

// The numbers that the formulas derive from them, for one step of one tensor.
struct Scalars {
  float beta1, rest1, beta2, rest2, eps, step_size, root_scale, decay;
};

namespace {

// x^n by repeated squaring: rounded alike everywhere, which pow() does not guarantee.
MC_INLINE double power(double x, int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= x;
    x *= x;
  }
  return result;
}

MC_INLINE float root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// Each formula has
// - scalars: its numbers for one step of one tensor;
// - update: the step of a parameter w by its gradient g;
// - rests: whether a step with gradients of zero, times `scale`, and moments of zero leaves the moments at zero, and
//   only multiplies the parameter by `decay`.

// Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
struct AdamW {
  static constexpr int kMoments = 2;
  MC_INLINE static Scalars scalars(const Settings& s, double step) {
    const double rest1 = 1.0 - power(s.beta1, (int64_t)step), rest2 = 1.0 - power(s.beta2, (int64_t)step);
    return {(float)s.beta1, (float)(1.0 - s.beta1), (float)s.beta2, (float)(1.0 - s.beta2), (float)s.eps,
            (float)(s.lr / rest1), (float)(1.0 / sqrt(rest2)), (float)(1.0 - s.lr * s.weight_decay)};
  }
  MC_INLINE static bool rests(const Scalars& s, float scale) { return s.step_size * (0.0f * scale) / s.eps == 0.0f; }
  MC_INLINE static void update(const Scalars& s, float g, float& w, float& m, float& v) {
    m = s.beta1 * m + s.rest1 * g;
    v = s.beta2 * v + (s.rest2 * g) * g;
    w = w * s.decay - (s.step_size * m) / (root(v) * s.root_scale + s.eps);
  }
};

// Chen et al., "Symbolic discovery of optimization algorithms", 2023.
struct Lion {
  static constexpr int kMoments = 1;
  MC_INLINE static Scalars scalars(const Settings& s, double) {
    return {(float)s.beta1, (float)(1.0 - s.beta1), (float)s.beta2, (float)(1.0 - s.beta2), 0.0f,
            (float)s.lr,    0.0f,                   (float)(1.0 - s.lr * s.weight_decay)};
  }
  MC_INLINE static bool rests(const Scalars& s, float scale) { return s.step_size * (0.0f * scale) == 0.0f; }
  MC_INLINE static void update(const Scalars& s, float g, float& w, float& m, float&) {
    const float c = s.beta1 * m + s.rest1 * g;
    // A NaN has no sign, but must reach the parameter, as in the other formulas.
    const float sign = c > 0.0f ? 1.0f : (c < 0.0f ? -1.0f : c);
    w = w * s.decay - s.step_size * sign;
    m = s.beta2 * m + s.rest2 * g;
  }
};

// torch.optim.SGD with momentum, without dampening; beta1 is the momentum. Weight decay is not decoupled.
struct Momentum {
  static constexpr int kMoments = 1;
  MC_INLINE static Scalars scalars(const Settings& s, double) {
    return {(float)s.beta1, s.flag ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f, (float)s.lr, 0.0f, (float)s.weight_decay};
  }
  MC_INLINE static bool rests(const Scalars&, float) { return false; }
  MC_INLINE static void update(const Scalars& s, float g, float& w, float& m, float&) {
    g = g + s.decay * w;
    m = s.beta1 * m + g;
    w = w - s.step_size * (s.rest1 != 0.0f ? g + s.beta1 * m : m);
  }
};

// From the sum of squares of gradients multiplied by loss_scale: their norm without it, the factor that unscales and
// clips them, and 1 if one of them is not finite, since then the sum of squares is not.
MC_INLINE void coefficients(double norm_sq, float loss_scale, double max_norm, double eps, float* norm, float* gscale,
                            float* found_inf) {
  const double value = sqrt(norm_sq) / (double)loss_scale;
  const double ratio = max_norm / (value + eps);
  *norm = (float)value;
  *gscale = (float)((ratio < 1.0 ? ratio : 1.0) / (double)loss_scale);
  *found_inf = value - value == 0.0 ? 0.0f : 1.0f;
}

// A hash of 32 bits to 32 bits: "lowbias32", Wellons 2018.
MC_INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

}  // namespace
}  // namespace modelcenter
