// The same operators on CUDA. Compiled with -fmad=false -ftz=true, so that they give the CPU's bits.
//
// A launch takes the table of its tensors as an argument, so nothing is copied to the device first; blocks stride over
// chunks of all tensors, so that a list of many small ones fills the device as one large one does. Dtypes and modes are
// branches that all threads take alike: the kernels wait for memory, and one kernel for each formula compiles fast.
#include "kernels.h"

#include <cuda_runtime.h>

#include "../core/quantize.h"

namespace modelcenter {
namespace {

constexpr int kTensors = 256;  // of a table: the arguments of a launch end at 32,764 bytes
constexpr int kThreads = 256;
constexpr int kVector = 4;  // elements of a thread at a time: 16 bytes in fp32

struct Table {
  Slab slab[kTensors];
  uint8_t first_type[kTensors], second_type[kTensors];
  int64_t first[kTensors + 1];  // chunk of each tensor
  int count;
};
static_assert(sizeof(Table) < 32000, "the arguments of a launch are limited");

__device__ __forceinline__ int tensor_of(const Table& t, int64_t chunk) {
  int low = 0, high = t.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (t.first[middle] <= chunk) low = middle;
    else high = middle;
  }
  return low;
}

// Elements [i, i + n) of a tensor, in one load where they are whole and aligned; zeros behind them.
template <class Four, class T>
__device__ __forceinline__ void load_four(const void* base, int64_t i, int n, T (&x)[kVector]) {
  const T* p = (const T*)base + i;
  if (n == kVector && (uintptr_t)p % sizeof(Four) == 0) {
    const Four all = *(const Four*)p;
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  } else {
#pragma unroll
    for (int k = 0; k < kVector; k++) x[k] = k < n ? p[k] : T(0);
  }
}

// The same back, in one store: nvcc cuts an assignment of a vector into one for each number.
template <class Four, class T>
__device__ __forceinline__ void store_four(void* base, int64_t i, int n, const T (&x)[kVector]) {
  T* p = (T*)base + i;
  if (n == kVector && (uintptr_t)p % sizeof(Four) == 0) {
    Four all;
    all.x = x[0], all.y = x[1], all.z = x[2], all.w = x[3];
    __stcg((Four*)p, all);
  } else {
#pragma unroll
    for (int k = 0; k < kVector; k++)
      if (k < n) p[k] = x[k];
  }
}

__device__ __forceinline__ void load(const void* base, int type, int64_t i, int n, float (&x)[kVector]) {
  if (type == kFloat) return load_four<float4>(base, i, n, x);
  uint16_t h[kVector];
  load_four<ushort4>(base, i, n, h);
#pragma unroll
  for (int k = 0; k < kVector; k++) x[k] = type == kBfloat16 ? from_bf16(h[k]) : from_fp16(h[k]);
}

__device__ __forceinline__ void store(void* base, int type, int64_t i, int n, const float (&x)[kVector]) {
  if (type == kFloat) return store_four<float4>(base, i, n, x);
  uint16_t h[kVector];
#pragma unroll
  for (int k = 0; k < kVector; k++) h[k] = type == kBfloat16 ? to_bf16(x[k]) : to_fp16(x[k]);
  store_four<ushort4>(base, i, n, h);
}

// Calls body(table index, slab, first element, count of at most kVector) for all elements of all tensors; before(index)
// on all threads of a block whenever it comes to another tensor.
template <class Before, class Body>
__device__ __forceinline__ void for_elements(const Table& t, const Before& before, const Body& body) {
  int last = -1;
  for (int64_t c = blockIdx.x; c < t.first[t.count]; c += gridDim.x) {
    const int index = tensor_of(t, c);
    if (index != last) before(index);
    last = index;
    const Slab& slab = t.slab[index];
    const int64_t begin = (c - t.first[index]) * kChunk;
    const int64_t end = begin + kChunk < slab.n ? begin + kChunk : slab.n;
    for (int64_t i = begin + (int64_t)threadIdx.x * kVector; i < end; i += kThreads * kVector)
      body(index, slab, i, end - i < kVector ? (int)(end - i) : kVector);
  }
}

__global__ void count_up(const __grid_constant__ Table t, const float* skip) {
  if (skip && *skip != 0.0f) return;
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < t.count) *t.slab[i].step += 1.0f;
}

// The fp32 values of parameters.
__device__ __forceinline__ void load_values(const Slab& slab, const Types& types, int64_t i, int n,
                                            float (&w)[kVector]) {
  if (types.mode == kRemainder) {
    uint16_t high[kVector], low[kVector];
    load_four<ushort4>(slab.p, i, n, high);
    load_four<ushort4>(slab.aux, i, n, low);
#pragma unroll
    for (int k = 0; k < kVector; k++) w[k] = merge(high[k], (int16_t)low[k]);
  } else {
    load(types.mode == kMaster ? slab.aux : slab.p, types.mode == kRandom ? kBfloat16 : kFloat, i, n, w);
  }
}

__device__ __forceinline__ void store_values(const Slab& slab, const Types& types, uint32_t salt, int64_t i, int n,
                                             const float (&w)[kVector]) {
  uint16_t high[kVector], low[kVector];
  if (types.mode == kRemainder) {
#pragma unroll
    for (int k = 0; k < kVector; k++) {
      int16_t rest;
      split(w[k], high[k], rest);
      low[k] = (uint16_t)rest;
    }
    store_four<ushort4>(slab.p, i, n, high);
    store_four<ushort4>(slab.aux, i, n, low);
  } else if (types.mode == kRandom) {
    int64_t row = i / slab.place.inner, column = i % slab.place.inner;
#pragma unroll  // an index that is not a constant would put these arrays, in each mode, into local memory
    for (int k = 0; k < kVector; k++) {
      if (k >= n) continue;
      const uint64_t here = (uint64_t)(slab.place.base + row * slab.place.stride + column);
      high[k] = to_bf16_at_random(w[k], salt, (uint32_t)here, (uint32_t)(here >> 32));
      if (++column == slab.place.inner) column = 0, row++;
    }
    store_four<ushort4>(slab.p, i, n, high);
  } else {
    if (types.mode == kMaster) store(slab.aux, kFloat, i, n, w);
    store(slab.p, types.p, i, n, w);
  }
}

// What the threads of a block share for one tensor.
template <class Formula>
__device__ __forceinline__ void prepare(const Slab& slab, const Settings& settings, Scalars& scalars, uint32_t& salt) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const double now = *slab.step;
    scalars = Formula::scalars(settings, now);
    salt = mix(mix((uint32_t)slab.place.key) ^ (uint32_t)(int64_t)now);
  }
  __syncthreads();
}

template <class Formula>
__global__ void __launch_bounds__(kThreads)
    step(const __grid_constant__ Table t, const Types types, const Settings settings, const float* gscale,
         const float* skip) {
  if (skip && *skip != 0.0f) return;
  __shared__ Scalars scalars;
  __shared__ uint32_t salt;
  const float scale = gscale ? *gscale : 1.0f;
  const auto before = [&](int index) { prepare<Formula>(t.slab[index], settings, scalars, salt); };
  for_elements(t, before, [&](int, const Slab& slab, int64_t i, int n) {
    float g[kVector], w[kVector], m[kVector], v[kVector] = {};
    load(slab.g, types.g, i, n, g);
    load(slab.m, types.m, i, n, m);
    if (Formula::kMoments == 2) load(slab.v, types.m, i, n, v);
    load_values(slab, types, i, n, w);
#pragma unroll
    for (int k = 0; k < kVector; k++) Formula::update(scalars, g[k] * scale, w[k], m[k], v[k]);
    store(slab.m, types.m, i, n, m);
    if (Formula::kMoments == 2) store(slab.v, types.m, i, n, v);
    store_values(slab, types, salt, i, n, w);
  });
}

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t x) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, x, lane);
    x = x > other ? x : other;
  }
  return x;
}

// A warp takes a block of 128, four elements of it each thread.
static_assert(kQuantBlock == 32 * kVector, "a warp takes a block");
constexpr int64_t kBlocks = kChunk / kQuantBlock;  // of a chunk

__global__ void __launch_bounds__(kThreads)
    step8(const __grid_constant__ Table t, const Types types, const Settings settings, const float* gscale,
          const float* skip) {
  if (skip && *skip != 0.0f) return;
  __shared__ Scalars scalars;
  __shared__ uint32_t salt;
  const float scale = gscale ? *gscale : 1.0f;
  const int lane = threadIdx.x % 32;
  int last = -1;
  for (int64_t c = blockIdx.x; c < t.first[t.count]; c += gridDim.x) {
    const int index = tensor_of(t, c);
    const Slab& slab = t.slab[index];
    if (index != last) prepare<AdamW>(slab, settings, scalars, salt);
    last = index;
    const int64_t per_row = (slab.width + kQuantBlock - 1) / kQuantBlock, all = slab.n / slab.width * per_row;
    const int64_t begin = (c - t.first[index]) * kBlocks, end = begin + kBlocks < all ? begin + kBlocks : all;
    for (int64_t b = begin + threadIdx.x / 32; b < end; b += kThreads / 32) {
      const int64_t column = b % per_row * kQuantBlock + lane * kVector, i = b / per_row * slab.width + column;
      const int64_t left = slab.width - column;
      const int n = left >= kVector ? kVector : left > 0 ? (int)left : 0;
      float g[kVector], w[kVector], m[kVector] = {}, v[kVector] = {};
      uint8_t first[kVector], second[kVector];
      load_four<uchar4>(slab.m, i, n, first);
      load_four<uchar4>(slab.v, i, n, second);
      const float m_scale = slab.m_scale[b], v_scale = slab.v_scale[b];
#pragma unroll
      for (int k = 0; k < kVector; k++)
        if (k < n) m[k] = from_first(first[k], m_scale), v[k] = from_second(second[k], v_scale);
      uint32_t most_m = 0, most_v = 0;
      if (n) {
        load(slab.g, types.g, i, n, g);
        load_values(slab, types, i, n, w);
#pragma unroll
        for (int k = 0; k < kVector; k++)
          if (k < n) {
            AdamW::update(scalars, g[k] * scale, w[k], m[k], v[k]);
            const uint32_t a = bits_of(m[k]) & 0x7FFFFFFFu, e = bits_of(v[k]) & 0x7FFFFFFFu;
            most_m = a > most_m ? a : most_m;
            most_v = e > most_v ? e : most_v;
          }
        store_values(slab, types, salt, i, n, w);
      }
      const float new_m = scale_of(largest_of_warp(most_m)), new_v = scale_of(largest_of_warp(most_v));
      const float by_m = divisor_of(new_m), by_v = divisor_of(new_v);
      if (lane == 0) slab.m_scale[b] = new_m, slab.v_scale[b] = new_v;
      const uint64_t here = place_of(slab.place, i - lane * kVector) + lane * kVector;
#pragma unroll
      for (int k = 0; k < kVector; k++) {
        const uint64_t at = here + k;
        first[k] = to_first(m[k], by_m);
        second[k] = to_second(v[k], by_v, random_of(salt, (uint32_t)at, (uint32_t)(at >> 32)));
      }
      store_four<uchar4>(slab.m, i, n, first);
      store_four<uchar4>(slab.v, i, n, second);
    }
  }
}

__global__ void __launch_bounds__(kThreads) squares(const __grid_constant__ Table t, double* partial) {
  __shared__ double sums[kThreads];
  for (int64_t c = blockIdx.x; c < t.first[t.count]; c += gridDim.x) {
    const int index = tensor_of(t, c);
    const Slab& slab = t.slab[index];
    const int64_t begin = (c - t.first[index]) * kChunk;
    const int64_t end = begin + kChunk < slab.n ? begin + kChunk : slab.n;
    double sum = 0.0;
    for (int64_t i = begin + (int64_t)threadIdx.x * kVector; i < end; i += kThreads * kVector) {
      float g[kVector];
      load(slab.g, t.first_type[index], i, end - i < kVector ? (int)(end - i) : kVector, g);
#pragma unroll
      for (int k = 0; k < kVector; k++) sum += (double)g[k] * (double)g[k];
    }
    sums[threadIdx.x] = sum;
    for (int width = kThreads / 2; width; width /= 2) {
      __syncthreads();
      if ((int)threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    }
    if (threadIdx.x == 0) partial[c] = sums[0];
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) add_up(const double* partial, int64_t count, double* out) {
  __shared__ double sums[kThreads];
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sums[threadIdx.x] = sum;
  for (int width = kThreads / 2; width; width /= 2) {
    __syncthreads();
    if ((int)threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
  }
  if (threadIdx.x == 0) *out = sums[0];
}

__global__ void coefficients_of(const double* norm_sq, const float* loss_scale, double max_norm, double eps,
                                float* norm, float* gscale, float* found_inf) {
  coefficients(*norm_sq, loss_scale ? *loss_scale : 1.0f, max_norm, eps, norm, gscale, found_inf);
}

__global__ void __launch_bounds__(kThreads) cast(const __grid_constant__ Table t, const float* scale) {
  const float factor = scale ? *scale : 1.0f;
  for_elements(t, [](int) {}, [&](int index, const Slab& slab, int64_t i, int n) {
    float x[kVector];
    load(slab.g, t.second_type[index], i, n, x);
    if (factor != 1.0f) {  // times 1 a denormal would become zero
#pragma unroll
      for (int k = 0; k < kVector; k++) x[k] *= factor;
    }
    store(slab.p, t.first_type[index], i, n, x);
  });
}

__global__ void __launch_bounds__(kThreads) take_apart(const __grid_constant__ Table t) {
  for_elements(t, [](int) {}, [&](int, const Slab& slab, int64_t i, int n) {
    float w[kVector];
    uint16_t high[kVector], low[kVector];
    load(slab.aux, kFloat, i, n, w);
#pragma unroll
    for (int k = 0; k < kVector; k++) {
      int16_t rest;
      split(w[k], high[k], rest);
      low[k] = (uint16_t)rest;
    }
    store_four<ushort4>(slab.p, i, n, high);
    store_four<ushort4>(slab.m, i, n, low);
  });
}

__global__ void __launch_bounds__(kThreads) put_together(const __grid_constant__ Table t) {
  for_elements(t, [](int) {}, [&](int, const Slab& slab, int64_t i, int n) {
    float w[kVector];
    uint16_t high[kVector], low[kVector];
    load_four<ushort4>(slab.p, i, n, high);
    load_four<ushort4>(slab.m, i, n, low);
#pragma unroll
    for (int k = 0; k < kVector; k++) w[k] = merge(high[k], (int16_t)low[k]);
    store(slab.aux, kFloat, i, n, w);
  });
}

// Blocks of a launch: enough for all multiprocessors, and not more than there are chunks.
int blocks(int64_t chunks) {
  int device = 0, processors = 1;
  if (cudaGetDevice(&device) == cudaSuccess)
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = (int64_t)processors * 8;
  return (int)(chunks < most ? chunks : most);
}

// Launches kernel(arguments...), unless there are no blocks. Returns 0 or a cudaError_t.
template <class... Parameters, class... Arguments>
int launch(void* stream, int64_t grid, int threads, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (grid == 0) return 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((unsigned)grid);
  config.blockDim = dim3((unsigned)threads);
  config.stream = (cudaStream_t)stream;
  return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Cuts the list into tables and calls work(table), which returns 0 or an error, for each.
template <class Work>
int for_tables(const Slab* slabs, const int* first_type, const int* second_type, int64_t count, const Work& work,
               bool blocks = false) {
  for (int64_t begin = 0; begin < count; begin += kTensors) {
    Table t;
    t.count = (int)(count - begin < kTensors ? count - begin : kTensors);
    t.first[0] = 0;
    for (int i = 0; i < t.count; i++) {
      t.slab[i] = slabs[begin + i];
      t.first_type[i] = (uint8_t)(first_type ? first_type[begin + i] : 0);
      t.second_type[i] = (uint8_t)(second_type ? second_type[begin + i] : 0);
      const Slab& slab = t.slab[i];
      int64_t chunks = (slab.n + kChunk - 1) / kChunk;
      if (blocks && slab.n)
        chunks = (slab.n / slab.width * ((slab.width + kQuantBlock - 1) / kQuantBlock) + kBlocks - 1) / kBlocks;
      t.first[i + 1] = t.first[i] + chunks;
    }
    if (const int error = work(t)) return error;
  }
  return 0;
}

__device__ __forceinline__ float number(const void* base, int type, int64_t i) {
  if (type == kFloat) return ((const float*)base)[i];
  const uint16_t h = ((const uint16_t*)base)[i];
  return type == kBfloat16 ? from_bf16(h) : from_fp16(h);
}

__device__ __forceinline__ void set_number(void* base, int type, int64_t i, float x) {
  if (type == kFloat) ((float*)base)[i] = x;
  else ((uint16_t*)base)[i] = type == kBfloat16 ? to_bf16(x) : to_fp16(x);
}

// A thread draws one counter, for 8 channels that lie 16 apart: neighbouring threads have neighbouring channels.
__global__ void __launch_bounds__(kThreads) drop(const Draw d, const void* x, const void* residual, void* out, int type,
                                                 int64_t rows, int64_t channels) {
  const int64_t first = d.first_channel / kDropoutBlock;
  const int64_t lanes = ((d.first_channel + channels - 1) / kDropoutBlock - first + 1) * kDropoutLanes;
  const int64_t all = rows * lanes, stride = (int64_t)gridDim.x * blockDim.x;
  const bool small = all >> 32 == 0;  // numbers of 64 bits take three times as long to divide
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += stride) {
    const int64_t row = small ? (int64_t)((uint32_t)i / (uint32_t)lanes) : i / lanes;
    const int64_t counter = first * kDropoutLanes + i - row * lanes;
    uint32_t words[4];
    philox(d.key_low, d.key_high, (uint32_t)counter, d.site, (uint64_t)(d.tokens ? d.tokens[row] : d.first_token + row),
           words);
    const int64_t begin = counter / kDropoutLanes * kDropoutBlock + counter % kDropoutLanes - d.first_channel;
#pragma unroll
    for (int slot = 0; slot < 8; slot++) {
      const int64_t channel = begin + slot * kDropoutLanes;
      if (channel < 0 || channel >= channels) continue;
      const int64_t at = row * channels + channel;
      const float y = dropped(number(x, type, at), words[slot / 2], slot % 2, d.threshold, d.scale);
      set_number(out, type, at, residual ? number(residual, type, at) + y : y);
    }
  }
}

}  // namespace

int cuda_step(int rule, const Slab* slabs, int64_t count, Types types, Settings settings, const float* gscale,
              const float* skip, void* stream) {
  const auto kernel = rule == kAdamW ? step<AdamW> : rule == kLion ? step<Lion> : rule == kMomentum ? step<Momentum>
                                                                                                    : step8;
  return for_tables(slabs, nullptr, nullptr, count, [&](const Table& t) {
    if (const int error = launch(stream, (t.count + 127) / 128, 128, count_up, t, skip)) return error;
    return launch(stream, blocks(t.first[t.count]), kThreads, kernel, t, types, settings, gscale, skip);
  }, rule == kAdamW8);
}

int64_t cuda_chunks(const int64_t* sizes, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; i++) chunks += (sizes[i] + kChunk - 1) / kChunk;
  return chunks;
}

int cuda_squares(const Slab* slabs, const int* types, int64_t count, double* partial, double* out, void* stream) {
  int64_t done = 0;
  const int error = for_tables(slabs, types, nullptr, count, [&](const Table& t) {
    double* const room = partial + done;
    done += t.first[t.count];
    return launch(stream, blocks(t.first[t.count]), kThreads, squares, t, room);
  });
  return error ? error : launch(stream, 1, kThreads, add_up, partial, done, out);
}

int cuda_coefficients(const double* norm_sq, const float* loss_scale, double max_norm, double eps, float* norm,
                      float* gscale, float* found_inf, void* stream) {
  return launch(stream, 1, 1, coefficients_of, norm_sq, loss_scale, max_norm, eps, norm, gscale, found_inf);
}

int cuda_cast(const Slab* slabs, const int* to, const int* from, int64_t count, const float* scale, void* stream) {
  return for_tables(slabs, to, from, count, [&](const Table& t) {
    return launch(stream, blocks(t.first[t.count]), kThreads, cast, t, scale);
  });
}

int cuda_split(const Slab* slabs, int64_t count, void* stream) {
  return for_tables(slabs, nullptr, nullptr, count, [&](const Table& t) {
    return launch(stream, blocks(t.first[t.count]), kThreads, take_apart, t);
  });
}

int cuda_merge(const Slab* slabs, int64_t count, void* stream) {
  return for_tables(slabs, nullptr, nullptr, count, [&](const Table& t) {
    return launch(stream, blocks(t.first[t.count]), kThreads, put_together, t);
  });
}

int cuda_dropout(const Draw& draw, const void* x, const void* residual, void* out, int type, int64_t rows,
                 int64_t channels, void* stream) {
  const int64_t per_row = (channels / kDropoutBlock + 2) * kDropoutLanes;
  const int64_t grid = blocks((rows * per_row + kThreads - 1) / kThreads);
  return launch(stream, grid, kThreads, drop, draw, x, residual, out, type, rows, channels);
}

}  // namespace modelcenter
