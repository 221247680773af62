// The same operators on CUDA. Compiled with -fmad=false -ftz=true, so that they give the CPU's bits.
//
// A launch takes the table of its tensors as an argument, so nothing is copied to the device first. Each block takes an
// equal and contiguous share of the elements of all tensors, so that a list of many small ones runs as one large one
// does: blocks take equally long, and seldom come to another tensor. Dtypes and modes are branches that all threads
// take alike: the kernels wait for memory, and one kernel for each formula compiles fast.
#include "kernels.h"

#include <cuda_runtime.h>

#include "../core/quantize.h"

namespace modelcenter {
namespace {

constexpr int kTensors = 256;  // of a table: the arguments of a launch end at 32,764 bytes
constexpr int kThreads = 256;
constexpr int kVector = 4;  // elements of a thread at a time: 16 bytes in fp32
constexpr int kUnit = kThreads * kVector;  // elements of a block at a time

struct Table {
  Slab slab[kTensors];
  uint8_t first_type[kTensors], second_type[kTensors];
  int64_t first[kTensors + 1];  // unit of each tensor: its units are numbered behind those of the tensors before it
  int count;
};
static_assert(sizeof(Table) < 32000, "the arguments of a launch are limited");

__device__ __forceinline__ int tensor_of(const Table& t, int64_t unit) {
  int low = 0, high = t.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (t.first[middle] <= unit) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ void words_of(uint4 all, uint32_t (&word)[kVector]) {
  word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
}
__device__ __forceinline__ void words_of(uint2 all, uint32_t (&word)[kVector]) { word[0] = all.x, word[1] = all.y; }
__device__ __forceinline__ void words_of(uint32_t all, uint32_t (&word)[kVector]) { word[0] = all; }

// Four numbers as they lie in memory, several to a word where they have fewer bits. All that a thread needs is loaded
// before the first of it becomes fp32, which waits for it.
struct Packed {
  uint32_t word[kVector];
};

// Elements [i, i + n) of a tensor, in one load where they are whole and aligned; zeros behind them.
template <class Vector, class T>
__device__ __forceinline__ Packed load_four(const void* base, int64_t i, int n) {
  static_assert(sizeof(Vector) == kVector * sizeof(T), "a vector of four");
  constexpr int kOfWord = 4 / sizeof(T);
  const T* p = (const T*)base + i;
  Packed x = {};
  if (n == kVector && (uintptr_t)p % sizeof(Vector) == 0) {
    const Vector all = *(const Vector*)p;
    words_of(all, x.word);
  } else {
#pragma unroll
    for (int k = 0; k < kVector; k++)
      if (k < n) x.word[k / kOfWord] |= (uint32_t)p[k] << (k % kOfWord * 8 * sizeof(T) % 32);
  }
  return x;
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

__device__ __forceinline__ Packed load(const void* base, int type, int64_t i, int n) {
  return type == kFloat ? load_four<uint4, uint32_t>(base, i, n) : load_four<uint2, uint16_t>(base, i, n);
}

__device__ __forceinline__ uint16_t half_of(const Packed& x, int k) {
  return (uint16_t)(x.word[k / 2] >> (k % 2 * 16));
}

__device__ __forceinline__ uint8_t byte_of(const Packed& x, int k) { return (uint8_t)(x.word[0] >> (k * 8)); }

__device__ __forceinline__ void to_floats(const Packed& from, int type, float (&x)[kVector]) {
  if (type == kFloat) {
#pragma unroll
    for (int k = 0; k < kVector; k++) x[k] = float_of(from.word[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kVector; k++)
      x[k] = type == kBfloat16 ? from_bf16(half_of(from, k)) : from_fp16(half_of(from, k));
  }
}

__device__ __forceinline__ void store(void* base, int type, int64_t i, int n, const float (&x)[kVector]) {
  if (type == kFloat) return store_four<float4>(base, i, n, x);
  uint16_t h[kVector];
#pragma unroll
  for (int k = 0; k < kVector; k++) h[k] = type == kBfloat16 ? to_bf16(x[k]) : to_fp16(x[k]);
  store_four<ushort4>(base, i, n, h);
}

// Calls body(table index, unit, whether the unit before was of another tensor) for the units of this block's share, on
// all of its threads. Shares differ by one unit at most.
template <class Body>
__device__ __forceinline__ void for_units(const Table& t, const Body& body) {
  const int64_t all = t.first[t.count];
  int64_t unit = all * blockIdx.x / gridDim.x;
  const int64_t end = all * (blockIdx.x + 1) / gridDim.x;
  int index = tensor_of(t, unit);
  for (bool another = true; unit < end; unit++, another = false) {
    while (t.first[index + 1] <= unit) index++, another = true;
    body(index, unit, another);
  }
}

// Calls body(table index, slab, first element, count of at most kVector, whether the unit before was of another tensor)
// for the elements of this block's share, on all of its threads: in a tensor's last unit the count may be 0.
template <class Body>
__device__ __forceinline__ void for_elements(const Table& t, const Body& body) {
  for_units(t, [&](int index, int64_t unit, bool another) {
    const Slab& slab = t.slab[index];
    const int64_t i = (unit - t.first[index]) * kUnit + (int)threadIdx.x * kVector, left = slab.n - i;
    body(index, slab, i, left >= kVector ? kVector : left > 0 ? (int)left : 0, another);
  });
}

__global__ void count_up(const __grid_constant__ Table t, const float* skip) {
  if (skip && *skip != 0.0f) return;
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < t.count) *t.slab[i].step += 1.0f;
}

// Where the fp32 values of parameters are.
struct PackedValues {
  Packed all, low;  // or, with remainders, all is the high half
};

__device__ __forceinline__ PackedValues load_values(const Slab& slab, const Types& types, int64_t i, int n) {
  if (types.mode == kRemainder)
    return {load_four<uint2, uint16_t>(slab.p, i, n), load_four<uint2, uint16_t>(slab.aux, i, n)};
  return {load(types.mode == kMaster ? slab.aux : slab.p, types.mode == kRandom ? kBfloat16 : kFloat, i, n), {}};
}

__device__ __forceinline__ void merge_four(const Packed& high, const Packed& low, float (&w)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; k++) w[k] = merge(half_of(high, k), (int16_t)half_of(low, k));
}

__device__ __forceinline__ void to_values(const PackedValues& from, const Types& types, float (&w)[kVector]) {
  if (types.mode == kRemainder) merge_four(from.all, from.low, w);
  else to_floats(from.all, types.mode == kRandom ? kBfloat16 : kFloat, w);
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

// What the threads of a block share for one tensor; all of them call it when they come to that tensor. What they loaded
// before may still be on its way meanwhile.
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
  for_elements(t, [&](int, const Slab& slab, int64_t i, int n, bool another) {
    const Packed some_g = load(slab.g, types.g, i, n), some_m = load(slab.m, types.m, i, n);
    Packed some_v = {};
    if (Formula::kMoments == 2) some_v = load(slab.v, types.m, i, n);
    const PackedValues some_w = load_values(slab, types, i, n);
    if (another) prepare<Formula>(slab, settings, scalars, salt);
    float g[kVector], w[kVector], m[kVector], v[kVector] = {};
    to_floats(some_g, types.g, g);
    to_floats(some_m, types.m, m);
    if (Formula::kMoments == 2) to_floats(some_v, types.m, v);
    to_values(some_w, types, w);
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

// A warp takes a block of 128, four elements of it each thread; a unit has one for each warp.
static_assert(kQuantBlock == 32 * kVector, "a warp takes a block");
constexpr int kWarps = kThreads / 32;

MC_INLINE int64_t quant_blocks(const Slab& slab, int64_t per_row) { return slab.n / slab.width * per_row; }

MC_INLINE int64_t quant_blocks_of_a_row(const Slab& slab) { return (slab.width + kQuantBlock - 1) / kQuantBlock; }

__global__ void __launch_bounds__(kThreads)
    step8(const __grid_constant__ Table t, const Types types, const Settings settings, const float* gscale,
          const float* skip) {
  if (skip && *skip != 0.0f) return;
  __shared__ Scalars scalars;
  __shared__ uint32_t salt;
  const float scale = gscale ? *gscale : 1.0f;
  const int lane = threadIdx.x % 32;
  for_units(t, [&](int index, int64_t unit, bool another) {
    const Slab& slab = t.slab[index];
    if (another) prepare<AdamW>(slab, settings, scalars, salt);
    const int64_t per_row = quant_blocks_of_a_row(slab);
    const int64_t b = (unit - t.first[index]) * kWarps + (int)threadIdx.x / 32;
    if (b >= quant_blocks(slab, per_row)) return;
    const int64_t column = b % per_row * kQuantBlock + lane * kVector, i = b / per_row * slab.width + column;
    const int64_t left = slab.width - column;
    const int n = left >= kVector ? kVector : left > 0 ? (int)left : 0;
    const Packed some_m = load_four<uint32_t, uint8_t>(slab.m, i, n);
    const Packed some_v = load_four<uint32_t, uint8_t>(slab.v, i, n);
    const float m_scale = slab.m_scale[b], v_scale = slab.v_scale[b];
    const Packed some_g = load(slab.g, types.g, i, n);
    const PackedValues some_w = load_values(slab, types, i, n);
    float m[kVector] = {}, v[kVector] = {};
#pragma unroll
    for (int k = 0; k < kVector; k++)
      if (k < n) m[k] = from_first(byte_of(some_m, k), m_scale), v[k] = from_second(byte_of(some_v, k), v_scale);
    uint32_t most_m = 0, most_v = 0;
    if (n) {
      float g[kVector], w[kVector];
      to_floats(some_g, types.g, g);
      to_values(some_w, types, w);
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
    uint8_t first[kVector], second[kVector];
#pragma unroll
    for (int k = 0; k < kVector; k++) {
      const uint64_t at = here + k;
      first[k] = to_first(m[k], by_m);
      second[k] = to_second(v[k], by_v, random_of(salt, (uint32_t)at, (uint32_t)(at >> 32)));
    }
    store_four<uchar4>(slab.m, i, n, first);
    store_four<uchar4>(slab.v, i, n, second);
  });
}

// Here a unit is a chunk, as the order of the sums depends on the sizes alone.
__global__ void __launch_bounds__(kThreads) squares(const __grid_constant__ Table t, double* partial) {
  __shared__ double sums[kThreads];
  for_units(t, [&](int index, int64_t unit, bool) {
    const Slab& slab = t.slab[index];
    const int64_t begin = (unit - t.first[index]) * kChunk;
    const int64_t end = begin + kChunk < slab.n ? begin + kChunk : slab.n;
    const int type = t.first_type[index];
    double sum = 0.0;
    for (int64_t i = begin + (int64_t)threadIdx.x * kVector; i < end; i += kUnit) {
      float g[kVector];
      to_floats(load(slab.g, type, i, end - i < kVector ? (int)(end - i) : kVector), type, g);
#pragma unroll
      for (int k = 0; k < kVector; k++) sum += (double)g[k] * (double)g[k];
    }
    sums[threadIdx.x] = sum;
    for (int width = kThreads / 2; width; width /= 2) {
      __syncthreads();
      if ((int)threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    }
    if (threadIdx.x == 0) partial[unit] = sums[0];
    __syncthreads();
  });
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
  for_elements(t, [&](int index, const Slab& slab, int64_t i, int n, bool) {
    float x[kVector];
    to_floats(load(slab.g, t.second_type[index], i, n), t.second_type[index], x);
    if (factor != 1.0f) {  // times 1 a denormal would become zero
#pragma unroll
      for (int k = 0; k < kVector; k++) x[k] *= factor;
    }
    store(slab.p, t.first_type[index], i, n, x);
  });
}

__global__ void __launch_bounds__(kThreads) take_apart(const __grid_constant__ Table t) {
  for_elements(t, [&](int, const Slab& slab, int64_t i, int n, bool) {
    float w[kVector];
    uint16_t high[kVector], low[kVector];
    to_floats(load(slab.aux, kFloat, i, n), kFloat, w);
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
  for_elements(t, [&](int, const Slab& slab, int64_t i, int n, bool) {
    float w[kVector];
    merge_four(load_four<uint2, uint16_t>(slab.p, i, n), load_four<uint2, uint16_t>(slab.m, i, n), w);
    store(slab.aux, kFloat, i, n, w);
  });
}

// Blocks of a launch over so many units: of equal work, up to one unit, and where there is enough of it several times
// as many as run at once, so that a multiprocessor that is faster than others takes more of them.
int blocks(int64_t units) {
  int device = 0, processors = 1;
  if (cudaGetDevice(&device) == cudaSuccess)
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  // A launch ends with some blocks running alone, so blocks are short; but of some units, where that leaves enough
  // blocks, because a block may have to compute the numbers of its tensor first.
  const int64_t shortest = (units + processors * 128 - 1) / (processors * 128);
  const int64_t enough = (units + processors * 8 - 1) / (processors * 8);
  const int64_t share = shortest > 4 ? shortest : enough < 4 ? enough : 4;
  return units ? (int)((units + share - 1) / share) : 0;
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

int64_t units(const Slab& slab) { return (slab.n + kUnit - 1) / kUnit; }

int64_t units_of_8_bits(const Slab& slab) {
  return slab.n ? (quant_blocks(slab, quant_blocks_of_a_row(slab)) + kWarps - 1) / kWarps : 0;
}

int64_t chunks(const Slab& slab) { return (slab.n + kChunk - 1) / kChunk; }

// Cuts the list into tables, whose tensors have so many units, and calls work(table), which returns 0 or an error, for
// each.
template <class Work>
int for_tables(const Slab* slabs, const int* first_type, const int* second_type, int64_t count, const Work& work,
               int64_t (*units_of)(const Slab&) = units) {
  for (int64_t begin = 0; begin < count; begin += kTensors) {
    Table t;
    t.count = (int)(count - begin < kTensors ? count - begin : kTensors);
    t.first[0] = 0;
    for (int i = 0; i < t.count; i++) {
      t.slab[i] = slabs[begin + i];
      t.first_type[i] = (uint8_t)(first_type ? first_type[begin + i] : 0);
      t.second_type[i] = (uint8_t)(second_type ? second_type[begin + i] : 0);
      t.first[i + 1] = t.first[i] + units_of(t.slab[i]);
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

// Where dropout is: 16 threads, which draw a counter each, take the blocks of 128 channels of all rows one by one.
struct Walk {
  int64_t rows, channels;
  uint32_t per_row;             // blocks that a row has channels of
  uint32_t rows_on, blocks_on;  // from one block of these threads to their next
};

constexpr int kGroups = kThreads / kDropoutLanes;  // of threads that take a block

struct Step {
  int64_t row;
  uint32_t block;  // of the row

  __device__ __forceinline__ explicit Step(const Walk& walk) {
    const uint32_t group = blockIdx.x * kGroups + threadIdx.x / kDropoutLanes;
    row = group / walk.per_row;
    block = group % walk.per_row;
  }
  __device__ __forceinline__ void next(const Walk& walk) {
    row += walk.rows_on;
    block += walk.blocks_on;
    if (block >= walk.per_row) block -= walk.per_row, row++;
  }
};

// The 8 times 16 bits that this thread's counter of a block gives.
__device__ __forceinline__ void draw(const Draw& d, const Step& at, uint32_t (&words)[4]) {
  const uint32_t block = (uint32_t)(d.first_channel / kDropoutBlock) + at.block;
  const int64_t token = d.tokens ? d.tokens[at.row] : d.first_token + at.row;
  philox(d.key_low, d.key_high, block * kDropoutLanes + threadIdx.x % kDropoutLanes, d.site, (uint64_t)token, words);
}

// Of the channels that a counter decides neighbours lie 16 apart: neighbouring threads have neighbouring channels.
__global__ void __launch_bounds__(kThreads) drop(const Draw d, const Walk walk, const void* x, const void* residual,
                                                 void* out, int type) {
  const int64_t skipped = d.first_channel % kDropoutBlock;
  for (Step at(walk); at.row < walk.rows; at.next(walk)) {
    uint32_t words[4];
    draw(d, at, words);
    const int64_t begin = (int64_t)at.block * kDropoutBlock + threadIdx.x % kDropoutLanes - skipped;
#pragma unroll
    for (int slot = 0; slot < 8; slot++) {
      const int64_t channel = begin + slot * kDropoutLanes;
      if (channel < 0 || channel >= walk.channels) continue;
      const int64_t i = at.row * walk.channels + channel;
      const float y = dropped(number(x, type, i), words[slot / 2], slot % 2, d.threshold, d.scale);
      set_number(out, type, i, residual ? number(residual, type, i) + y : y);
    }
  }
}

__device__ __forceinline__ float of_fp16(uint16_t h) {
#ifdef __NVCC__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  return from_fp16(h);
#endif
}

template <int kType>
constexpr int kOf16Bytes = kType == kFloat ? 4 : 8;  // numbers

template <int kType>
__device__ __forceinline__ void unpack(const uint4& from, float (&x)[kOf16Bytes<kType>]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int k = 0; k < kOf16Bytes<kType>; k++) {
    if (kType == kFloat) {
      x[k] = float_of(words[k % 4]);
    } else {
      const uint16_t h = (uint16_t)(words[k / 2] >> (k % 2 * 16));
      x[k] = kType == kBfloat16 ? from_bf16(h) : of_fp16(h);
    }
  }
}

template <int kType>
__device__ __forceinline__ uint32_t pair(float low, float high) {
  const uint32_t a = kType == kBfloat16 ? to_bf16(low) : to_fp16(low);
  return a | (uint32_t)(kType == kBfloat16 ? to_bf16(high) : to_fp16(high)) << 16;
}

// The same by the processor, in a tenth of the instructions: it differs in the bits of NaNs alone.
template <int kType>
__device__ __forceinline__ uint32_t fast_pair(float low, float high) {
#if !defined(__NVCC__)  // as it would be
  const uint32_t both = pair<kType>(low, high);
  return (low == low ? both & 0xFFFFu : 0x7FFFu) | (high == high ? both & 0xFFFF0000u : 0x7FFF0000u);
#elif __CUDA_ARCH__ >= 800
  uint32_t both;
  if (kType == kBfloat16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return pair<kType>(low, high);
#endif
}

template <int kType>
__device__ __forceinline__ uint4 pack(const float (&x)[kOf16Bytes<kType>]) {
  uint32_t words[4];
  bool number = true;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if constexpr (kType == kFloat) {
      words[k] = bits_of(x[k]);
    } else {
      words[k] = fast_pair<kType>(x[2 * k], x[2 * k + 1]);
      number = number && x[2 * k] == x[2 * k] && x[2 * k + 1] == x[2 * k + 1];
    }
  }
  if constexpr (kType != kFloat) {
    if (!number) {
#pragma unroll
      for (int k = 0; k < 4; k++) words[k] = pair<kType>(x[2 * k], x[2 * k + 1]);
    }
  }
  uint4 all;
  all.x = words[0], all.y = words[1], all.z = words[2], all.w = words[3];
  return all;
}

// The same where all rows, and the first channels of their blocks, begin at multiples of 16 bytes: a thread moves so
// many at a time. What decides over its numbers was drawn by its neighbours, and is exchanged as one bit each.
template <int kType>
__global__ void __launch_bounds__(kThreads)
    drop_vectors(const Draw d, const Walk walk, const void* x, const void* residual, void* out) {
  constexpr int kNumbers = kOf16Bytes<kType>;
  constexpr int kParts = 8 / kNumbers;  // of a block, of each of which a thread has 16 bytes
  constexpr int kSlots = 8 / kParts;    // of 16 channels, that a part has
  const int64_t skipped = d.first_channel % kDropoutBlock;
  const int lane = threadIdx.x % kDropoutLanes, half = threadIdx.x % 32 / kDropoutLanes;
  const int slot = lane * kNumbers / kDropoutLanes;
  const int shift = half * kDropoutLanes + lane * kNumbers % kDropoutLanes;
  const uint32_t limit = d.threshold << 16;
  // Both halves of a warp go on until the first, which is never behind the second, is done.
  for (Step at(walk); at.row - (half && at.block == 0) < walk.rows; at.next(walk)) {
    const bool there = at.row < walk.rows;
    const int64_t begin = (int64_t)at.block * kDropoutBlock - skipped + lane * kNumbers;
    uint4 found[kParts] = {}, more[kParts] = {};
    int64_t i[kParts];
    bool inside[kParts];
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const int64_t channel = begin + part * (kDropoutBlock / kParts);
      inside[part] = there && (uint64_t)channel < (uint64_t)walk.channels;
      i[part] = (int64_t)((uint64_t)(at.row * walk.channels + channel) / kNumbers);
      if (!inside[part]) continue;
      found[part] = ((const uint4*)x)[i[part]];
      if (residual) more[part] = ((const uint4*)residual)[i[part]];
    }
    uint32_t words[4] = {};
    if (there) draw(d, at, words);
    uint32_t votes[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
      votes[k] = __ballot_sync(0xFFFFFFFFu, (k % 2 ? words[k / 2] : words[k / 2] << 16) >= limit);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      uint32_t kept = 0;
#pragma unroll
      for (int k = 0; k < kSlots; k++) kept = slot == k ? votes[part * kSlots + k] : kept;
      kept >>= shift;
      if (!inside[part]) continue;
      float y[kNumbers], add[kNumbers];
      unpack<kType>(found[part], y);
      unpack<kType>(more[part], add);
#pragma unroll
      for (int k = 0; k < kNumbers; k++) {
        y[k] = kept >> k & 1u ? y[k] * d.scale : 0.0f;
        if (residual) y[k] = add[k] + y[k];
      }
      __stcg((uint4*)out + i[part], pack<kType>(y));
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
  }, rule == kAdamW8 ? units_of_8_bits : units);
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
  }, chunks);
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
  const int64_t first = draw.first_channel / kDropoutBlock, last = (draw.first_channel + channels - 1) / kDropoutBlock;
  Walk walk{rows, channels, (uint32_t)(last - first + 1), 0, 0};
  const int64_t grid = blocks((rows * walk.per_row + kGroups - 1) / kGroups);
  walk.rows_on = (uint32_t)(grid * kGroups / walk.per_row);
  walk.blocks_on = (uint32_t)(grid * kGroups % walk.per_row);
  const int vector = 16 / size_of(type);
  if (draw.first_channel % vector || channels % vector || ((uintptr_t)x | (uintptr_t)residual | (uintptr_t)out) % 16)
    return launch(stream, grid, kThreads, drop, draw, walk, x, residual, out, type);
  const auto kernel = type == kFloat ? drop_vectors<kFloat>
                                     : type == kBfloat16 ? drop_vectors<kBfloat16> : drop_vectors<kHalf>;
  return launch(stream, grid, kThreads, kernel, draw, walk, x, residual, out);
}

}  // namespace modelcenter
