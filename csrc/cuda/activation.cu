// The activations of feed-forward networks, alone or multiplied by a second matrix, and their gradients, with the
// column sums of one of these, which are the gradient of a bias. Computed in fp32 and rounded once, whereas torch
// rounds an activation before it is multiplied. Tested against float64, not bit for bit.
//
// A GPU moves the numbers of a backward pass in the time of 40 instructions per number. The functions here take a few
// instructions, two of them on the unit that processes a quarter of a warp at a time.
#include "activation.h"

#include <math.h>

#include "row.h"

namespace modelcenter {
namespace {

constexpr int kThreads = 256;

// 1 / x by one instruction, within one ulp. (With -ftz=true, exp2f is one instruction, too, within two ulps.)
__device__ __forceinline__ float reciprocal(float x) {
#ifdef __NVCC__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

constexpr float kLog2E = 1.442695041f;  // log2(e)

// The standard normal cumulative distribution function. exponential: e^(-x^2 / 2). The tail above |x| is that times a
// smooth factor: r times a polynomial of r = 1 / (1 + 0.255 |x|), as in Abramowitz and Stegun 7.1.26, fitted so that
// the relative error is at most (1 + x^2) 7e-8: 4e-7 of GELU in fp32, where torch loses 1e-6, and all digits below -5.
__device__ __forceinline__ float below(float x, float& exponential) {
  exponential = exp2f(x * x * (-0.5f * kLog2E));
  const float r = reciprocal(fmaf(fabsf(x), 0.255f, 1.0f));
  float part = fmaf(-0.08220896125f, r, 0.28222349286f);
  part = fmaf(part, r, -0.17942364514f);
  part = fmaf(part, r, 0.21689140797f);
  part = fmaf(part, r, 0.05234719440f);
  part = fmaf(part, r, 0.10893943161f);
  part = fmaf(part, r, 0.10123111308f);
  const float above = part * r * exponential;
  return x > 0.0f ? 1.0f - above : above;
}

// 1 / (1 + 2^z).
__device__ __forceinline__ float sigmoid(float z) { return reciprocal(1.0f + exp2f(z)); }

// The same if z has the sign of -x, with the derivative with respect to -z ln(2), without cancellation on either side.
__device__ __forceinline__ float sigmoid(float x, float z, float& derivative) {
  const float small = exp2f(-fabsf(z)), large = reciprocal(1.0f + small), other = small * large;
  derivative = other * large;
  return x > 0.0f ? large : other;
}

// GELU's tanh approximation is x times the sigmoid of kSteep x (1 + kCubic x^2): 1 + tanh(u) = 2 / (1 + e^(-2u)).
constexpr float kSteep = 1.595769122f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)

__device__ __forceinline__ float exponent_of_gelu(float x, float square) {
  return x * fmaf(square, -kLog2E * kSteep * kCubic, -kLog2E * kSteep);
}

constexpr float kDensity = 0.3989422804f;  // 1 / sqrt(2 pi)

// The activation of x.
template <int kKind>
__device__ __forceinline__ float activated(float x) {
  float exponential;
  if constexpr (kKind == kGelu) return x * below(x, exponential);
  else if constexpr (kKind == kGeluTanh) return x * sigmoid(exponent_of_gelu(x, x * x));
  else if constexpr (kKind == kSilu) return x * sigmoid(x * -kLog2E);
  else return x <= 0.0f ? 0.0f : x;
}

// The gradient of x for that of the activation. value: the activation.
template <int kKind>
__device__ __forceinline__ float derived(float x, float grad, float& value) {
  if constexpr (kKind == kRelu) {
    value = activated<kRelu>(x);
    return x <= 0.0f ? 0.0f : grad;
  } else {
    float share, derivative;  // value is x * share, and derivative that of share
    if constexpr (kKind == kGelu) {
      share = below(x, derivative);
      derivative *= kDensity;
    } else if constexpr (kKind == kGeluTanh) {
      const float square = x * x;
      share = sigmoid(x, exponent_of_gelu(x, square), derivative);
      derivative *= fmaf(square, 3.0f * kSteep * kCubic, kSteep);
    } else {
      share = sigmoid(x, x * -kLog2E, derivative);
    }
    value = x * share;
    return grad * fmaf(x, derivative, share);
  }
}

// Calls work(kind) with kind as a constant. All threads take the same branch.
template <class Work>
__device__ __forceinline__ void with_kind(int kind, const Work& work) {
  if (kind == kGelu) work(std::integral_constant<int, kGelu>());
  else if (kind == kGeluTanh) work(std::integral_constant<int, kGeluTanh>());
  else if (kind == kSilu) work(std::integral_constant<int, kSilu>());
  else work(std::integral_constant<int, kRelu>());
}

// The inputs that a thread reads from a row, or from a slice of all elements.
template <int kType, bool kGated, bool kBackward>
struct Inputs {
  Packed<kType> x, up, grad;

  template <bool kAligned>
  __device__ __forceinline__ void load_at(const ActivationJob& job, int64_t first, const Place<kAligned>& at) {
    const int64_t place = first * (kType == kFloat ? 4 : 2);
    x = load<kType>((const char*)job.x + place, at);
    if constexpr (kGated) up = load<kType>((const char*)job.up + place, at);
    if constexpr (kBackward) grad = load<kType>((const char*)job.grad + place, at);
  }

  // Stores the results, and adds dx, or the activation, to total.
  template <bool kAligned>
  __device__ __forceinline__ void run(const ActivationJob& job, int64_t first, const Place<kAligned>& at,
                                      float (&total)[kPer]) const {
    Packed<kType> out, dup;
    with_kind(job.kind, [&](auto kind) {
      [[maybe_unused]] float v[kPer], u[kPer], g[kPer];
      unpack<kType>(x, v);
      if constexpr (kGated) unpack<kType>(up, u);
      if constexpr (kBackward) unpack<kType>(grad, g);
#pragma unroll
      for (int k = 0; k < kPer; k++) {
        if constexpr (kBackward) {
          float value;
          v[k] = derived<kind.value>(v[k], kGated ? g[k] * u[k] : g[k], value);
          if constexpr (kGated) u[k] = g[k] * value;
        } else {
          v[k] = activated<kind.value>(v[k]);
          if constexpr (kGated) v[k] *= u[k];
        }
        total[k] += v[k];
      }
      out = pack<kType>(v);
      if constexpr (kGated && kBackward) dup = pack<kType>(u);
    });
    const int64_t place = first * (kType == kFloat ? 4 : 2);
    store<kType>((char*)(kBackward ? job.dx : job.out) + place, at, out);
    if constexpr (kGated && kBackward) store<kType>((char*)job.dup + place, at, dup);
  }
};

constexpr int most(int a, int b) { return a > b ? a : b; }

// How often a thread reads 8 elements of each matrix before it waits for them: up to 64 bytes in all, but at least
// once.
template <int kType, bool kGated, bool kBackward, bool kAligned>
constexpr int kLoads = kAligned ? most(1, 64 / (kPer * (kType == kFloat ? 4 : 2) * (1 + kGated + kBackward))) : 1;
constexpr int kSlice = kThreads * kPer;  // numbers of a block

// Activations of all elements, one slice after the other.
template <int kType, bool kGated, bool kBackward, bool kAligned>
__global__ void __launch_bounds__(kThreads, 4) activate(const ActivationJob job, int64_t count) {
  using Read = Inputs<kType, kGated, kBackward>;
  constexpr int kAtOnce = kLoads<kType, kGated, kBackward, kAligned>;
  const int64_t begin = (int64_t)blockIdx.x * kSlice * kAtOnce;
  const auto place = [&](int i) {
    const int64_t left = count - begin - i * kSlice;
    return Place<kAligned>(left < kSlice ? left > 0 ? (int)left : 0 : kSlice, (int)threadIdx.x, kThreads);
  };
  Read read[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) read[i].load_at(job, begin + i * kSlice, place(i));
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    float nobody_asks[kPer] = {};
    read[i].run(job, begin + i * kSlice, place(i), nobody_asks);
  }
}

// The gradients, and the sums of dx over the rows of each part. Before a warp processes a row, it loads the row after
// the next, or the next one if registers are short.
template <int kType, bool kGated, bool kAligned>
__global__ void __launch_bounds__(kWarps * kWarp, kType == kFloat && kGated ? 3 : kBlocks)
    derive_and_sum(const ActivationJob job, float* sums, int64_t tiles) {
  using Read = Inputs<kType, kGated, true>;
  constexpr int kAhead = kAligned && !kGated && kType != kFloat ? 2 : 1;
  const Part<kAligned> part(job.rows, job.n, tiles);
  const int64_t first = part.begin + threadIdx.x / kWarp;
  float total[kPer] = {};
  Read next[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (first + i * kWarps < part.end) next[i].load_at(job, (first + i * kWarps) * job.n + part.column, part.at);
  for (int64_t rows = first; rows < part.end; rows += kAhead * kWarps) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int64_t row = rows + i * kWarps, after = row + kAhead * kWarps;
      if (row >= part.end) continue;
      const Read read = next[i];
      if (after < part.end) next[i].load_at(job, after * job.n + part.column, part.at);
      read.run(job, row * job.n + part.column, part.at, total);
    }
  }
  store_sums(total, part, sums, job.n);
}

template <bool kBackward>
int run_all(const ActivationJob& job, void* stream) {
  const int64_t count = job.rows * job.n;
  const bool aligned = on_16_bytes(count, {job.x, job.up, job.out, job.grad, job.dx, job.dup});
  return with_constants(job.type, aligned, [&](auto type, auto is_aligned) {
    constexpr int kType = type.value;
    constexpr bool kAligned = is_aligned.value;
    const auto run = [&](auto gated) {
      constexpr bool kGated = gated.value;
      const int64_t of_block = kSlice * kLoads<kType, kGated, kBackward, kAligned>;
      return launch(stream, (count + of_block - 1) / of_block, kThreads, activate<kType, kGated, kBackward, kAligned>,
                    job, count);
    };
    return job.up ? run(std::true_type()) : run(std::false_type());
  });
}

}  // namespace

int cuda_activation(const ActivationJob& job, void* stream) { return run_all<false>(job, stream); }

int64_t cuda_activation_room(const ActivationJob& job) { return parts_of(job.rows, job.n) * job.n; }

int cuda_activation_backward(const ActivationJob& job, void* sums, float* room, void* stream) {
  if (!sums) return run_all<true>(job, stream);
  const int64_t tiles = tiles_of(job.n), parts = parts_of(job.rows, job.n);
  const bool aligned = on_16_bytes(job.n, {job.x, job.up, job.grad, job.dx, job.dup});
  const int error = with_constants(job.type, aligned, [&](auto type, auto is_aligned) {
    constexpr int kType = type.value;
    constexpr bool kAligned = is_aligned.value;
    const auto kernel = job.up ? derive_and_sum<kType, true, kAligned> : derive_and_sum<kType, false, kAligned>;
    return launch(stream, tiles * parts, kWarps * kWarp, kernel, job, room, tiles);
  });
  return error ? error : add_up(room, parts, job.n, sums, nullptr, job.n, job.type, stream);
}

}  // namespace modelcenter
