// Cross-entropy of rows of logits and its gradient, which overwrites them, on CUDA. A block takes a row: it reads it
// once for the largest logit and the sum of exponentials, and once more, from the caches, for the gradient.
#include "loss.h"

#include <assert.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>

#include <type_traits>

#include "device.h"

namespace modelcenter {
namespace {

constexpr int kThreads = 1024;  // more, smaller blocks would process more rows than the L2 cache holds
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 2;  // vectors that a thread loads at a time
constexpr int64_t kGrid = 65535;

// One number of a type in memory.
template <int kType>
using Bits = std::conditional_t<kType == kFloat, uint32_t, uint16_t>;

template <int kType>
__device__ __forceinline__ float to_float(Bits<kType> bits) {
  if (kType == kFloat) return float_of((uint32_t)bits);
  return kType == kBfloat16 ? from_bf16((uint16_t)bits) : from_fp16((uint16_t)bits);
}

template <int kType>
__device__ __forceinline__ Bits<kType> from_float(float x) {
  if (kType == kFloat) return (Bits<kType>)bits_of(x);
  return (Bits<kType>)(kType == kBfloat16 ? to_bf16(x) : to_fp16(x));
}

// Of some of the logits x: the largest, the sum of e^(x - largest), and the sum. `most` starts finite, so that a logit
// of minus infinity adds nothing, wherever it comes.
struct Statistics {
  float most = -FLT_MAX, sum = 0.0f, total = 0.0f;
};

template <int n>
__device__ __forceinline__ void add(Statistics& s, const float (&x)[n], bool smooth) {
  float most = s.most;
#pragma unroll
  for (int k = 0; k < n; k++) most = fmaxf(most, x[k]);
  s.sum *= __expf(s.most - most);
#pragma unroll
  for (int k = 0; k < n; k++) s.sum += __expf(x[k] - most);
  s.most = most;
  if (smooth) {
#pragma unroll
    for (int k = 0; k < n; k++) s.total += x[k];
  }
}

__device__ __forceinline__ float of_lane(float x, int other) {
  return float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(x), other));
}

// The statistics of all lanes of a warp, in each lane.
__device__ __forceinline__ Statistics of_warp(Statistics s) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2) {
    const float most = of_lane(s.most, lane), sum = of_lane(s.sum, lane), total = of_lane(s.total, lane);
    const float larger = fmaxf(s.most, most);
    s.sum = s.sum * __expf(s.most - larger) + sum * __expf(most - larger);
    s.total += total;
    s.most = larger;
  }
  return s;
}

// The parts of a row: elements before the first aligned vector, and whole vectors from there.
struct Parts {
  int head, vectors;
};

template <int kType>
__device__ __forceinline__ Parts parts_of(const Bits<kType>* x, int n) {
  const int head = (int)(-(uintptr_t)x % 16) / (int)sizeof(*x);
  if (head >= n) return {n, 0};
  return {head, (n - head) / kOf16Bytes<kType>};
}

// Calls one(i) for each element of a row outside its whole vectors.
template <int kType, class One>
__device__ __forceinline__ void for_ends(const Parts& parts, int n, const One& one) {
  const int thread = (int)threadIdx.x, behind = parts.head + parts.vectors * kOf16Bytes<kType>;
  if (thread < parts.head) one(thread);
  if (thread < n - behind) one(behind + thread);
}

// Calls each(vector) for the thread's vectors; several are loaded before the first is processed.
template <class Each>
__device__ __forceinline__ void for_vectors(const uint4* x, int vectors, const Each& each) {
  int i = (int)threadIdx.x;
  for (; i < vectors - (kLoads - 1) * kThreads; i += kLoads * kThreads) {
    uint4 all[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; k++) all[k] = x[i + k * kThreads];
#pragma unroll
    for (int k = 0; k < kLoads; k++) each(all[k]);
  }
  for (; i < vectors; i += kThreads) each(x[i]);
}

// The same from the end of a row that was read before, as its end is in the nearest caches.
template <class Each>
__device__ __forceinline__ void for_vectors_back(uint4* x, int vectors, const Each& each) {
  int i = vectors - 1 - (int)threadIdx.x;
  for (; i >= (kLoads - 1) * kThreads; i -= kLoads * kThreads) {
    uint4 all[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; k++) all[k] = x[i - k * kThreads];
#pragma unroll
    for (int k = 0; k < kLoads; k++) x[i - k * kThreads] = each(all[k]);
  }
  for (; i >= 0; i -= kThreads) x[i] = each(x[i]);
}

template <int kType>
__global__ void __launch_bounds__(kThreads)
    cross_entropy(Bits<kType>* logits, int64_t stride, const int64_t* targets, float* loss, int64_t rows, int n,
                  const float* count, float scale, float smoothing, bool train) {
  constexpr int kVector = kOf16Bytes<kType>;
  __shared__ float most[kWarps], sum[kWarps], total[kWarps], at;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool smooth = smoothing != 0.0f;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    Bits<kType>* const x = logits + row * stride;
    const Parts parts = parts_of<kType>(x, n);
    uint4* const vectors = (uint4*)(x + parts.head);
    if (threadIdx.x == 0) {  // before any thread writes
      assert(targets[row] >= 0 && targets[row] < n && "a target of cross_entropy_ is none of the classes");
      at = to_float<kType>(x[targets[row]]);
    }
    Statistics s;
    for_vectors(vectors, parts.vectors, [&](const uint4& all) {
      float values[kVector];
      unpack_16_bytes<kType>(all, values);
      add(s, values, smooth);
    });
    for_ends<kType>(parts, n, [&](int i) {
      const float value[1] = {to_float<kType>(x[i])};
      add(s, value, smooth);
    });
    s = of_warp(s);
    if (lane == 0) most[warp] = s.most, sum[warp] = s.sum, total[warp] = s.total;
    __syncthreads();
    s = Statistics();
    if (lane < kWarps) s.most = most[lane], s.sum = sum[lane], s.total = total[lane];
    s = of_warp(s);
    if (threadIdx.x == 0) {
      const float log_sum = logf(s.sum);  // rounds less than lse, of which it is a part, for large logits
      float found = log_sum + (s.most - at);
      if (smooth) found = (1.0f - smoothing) * found + smoothing * (log_sum + (s.most - s.total / (float)n));
      loss[row] = found;
    }
    if (train) {
      const float whole = count ? scale / *count : scale;
      const float share = whole / s.sum, least = smoothing * whole / (float)n;
      const auto gradient = [&](float value) { return __expf(value - s.most) * share - least; };
      for_vectors_back(vectors, parts.vectors, [&](const uint4& all) {
        float values[kVector];
        unpack_16_bytes<kType>(all, values);
#pragma unroll
        for (int k = 0; k < kVector; k++) values[k] = gradient(values[k]);
        return pack_16_bytes<kType>(values);
      });
      for_ends<kType>(parts, n, [&](int i) { x[i] = from_float<kType>(gradient(to_float<kType>(x[i]))); });
      __syncthreads();  // the vector store at the target is complete
      if (threadIdx.x == 0) x[targets[row]] = from_float<kType>(gradient(at) - (1.0f - smoothing) * whole);
    }
    __syncthreads();  // all threads have read the shared numbers
  }
}

template <int kType>
int run(void* x, int64_t stride, const int64_t* target, float* loss, int64_t rows, int classes, const float* count,
        float scale, float smoothing, bool train, void* stream) {
  return launch(stream, rows < kGrid ? rows : kGrid, kThreads, cross_entropy<kType>, (Bits<kType>*)x, stride,
                target, loss, rows, classes, count, scale, smoothing, train);
}

}  // namespace

int cuda_cross_entropy(void* x, int type, int64_t stride, const int64_t* target, float* loss, int64_t rows,
                       int64_t classes, const float* count, float scale, float smoothing, bool train, void* stream) {
  const auto of_type = type == kFloat ? run<kFloat> : type == kBfloat16 ? run<kBfloat16> : run<kHalf>;
  return of_type(x, stride, target, loss, rows, (int)classes, count, scale, smoothing, train, stream);
}

}  // namespace modelcenter
