// The optimizers' operators on CUDA. Compiled with -fmad=false -ftz=true, so that they give the CPU's bits.
//
// A launch takes the table of its tensors as an argument, so nothing is copied to the device first. Each block takes an
// equal and contiguous share of the elements of all tensors, so that a list of many small tensors runs like one large
// tensor: blocks take equally long, and seldom reach another tensor. Dtypes and modes are branches that all threads
// take alike: the kernels are bound by memory, and one kernel per formula compiles fast.
#include "kernels.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "../core/quantize.h"
#include "device.h"

namespace modelcenter {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;  // elements per thread at a time: 16 bytes in fp32
constexpr int kUnit = kThreads * kVector;  // elements per block at a time

// Entries are only Memory for most kernels, so that a launch takes more of them, and whole slabs for those that draw
// random numbers or have 8-bit moments.
template <class Entry>
constexpr bool kPlaced = std::is_same_v<Entry, Slab>;

template <class Entry>
struct Table {
  static constexpr int kTensors = kPlaced<Entry> ? 256 : 512;
  Entry slab[kTensors];
  uint8_t first_type[kTensors], second_type[kTensors];
  uint32_t first[kTensors + 1];  // unit of each tensor; units are numbered across all tensors
  int count;
};
static_assert(sizeof(Table<Slab>) < 32000 && sizeof(Table<Memory>) < 32000, "a launch takes 32,764 bytes of arguments");

template <class Entry>
__device__ __forceinline__ int tensor_of(const Table<Entry>& t, int64_t unit) {
  int low = 0, high = t.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (t.first[middle] <= unit) low = middle;
    else high = middle;
  }
  return low;
}

// Vectors of less than 16 bytes.
__device__ __forceinline__ void words_of(uint2 all, uint32_t* words) { words[0] = all.x, words[1] = all.y; }
__device__ __forceinline__ void words_of(uint32_t all, uint32_t* words) { words[0] = all; }

// Four numbers as in memory, several per word if they have fewer bits. A thread loads everything that it needs before
// it converts the first of it to fp32, which waits for the load.
struct Packed {
  uint32_t word[kVector];
};

// Elements [i, i + n) of a tensor, in one load if they are complete and aligned; followed by zeros.
template <class Vector, class T>
__device__ __forceinline__ Packed load_four(const void* base, int64_t i, int n) {
  static_assert(sizeof(Vector) == kVector * sizeof(T), "a vector of four");
  constexpr int kPerWord = 4 / sizeof(T);
  const T* p = (const T*)base + i;
  Packed x = {};
  if (n == kVector && (uintptr_t)p % sizeof(Vector) == 0) {
    const Vector all = *(const Vector*)p;
    words_of(all, x.word);
  } else {
#pragma unroll
    for (int k = 0; k < kVector; k++)
      if (k < n) x.word[k / kPerWord] |= (uint32_t)p[k] << (k % kPerWord * 8 * sizeof(T) % 32);
  }
  return x;
}

// The reverse, in one store: nvcc splits the assignment of a vector into one per number.
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

// Calls body(table index, unit, whether the previous unit belonged to another tensor) for the units of this block's
// share, on all of its threads. Shares differ by at most one unit.
template <class Entry, class Body>
__device__ __forceinline__ void for_units(const Table<Entry>& t, const Body& body) {
  const int64_t all = t.first[t.count];
  int64_t unit = all * blockIdx.x / gridDim.x;
  const int64_t end = all * (blockIdx.x + 1) / gridDim.x;
  int index = tensor_of(t, unit);
  for (bool another = true; unit < end; unit++, another = false) {
    while (t.first[index + 1] <= unit) index++, another = true;
    body(index, unit, another);
  }
}

// Calls body(table index, slab, first element, count, whether the previous unit belonged to another tensor) for the
// elements of this block's share, on all of its threads. The count is at most kVector; in a tensor's last unit it may
// be 0.
template <class Entry, class Body>
__device__ __forceinline__ void for_elements(const Table<Entry>& t, const Body& body) {
  for_units(t, [&](int index, int64_t unit, bool another) {
    const Entry& slab = t.slab[index];
    const int64_t i = (unit - t.first[index]) * kUnit + (int)threadIdx.x * kVector, left = slab.n - i;
    body(index, slab, i, left >= kVector ? kVector : left > 0 ? (int)left : 0, another);
  });
}

template <class Entry>
__global__ void count_up(const __grid_constant__ Table<Entry> t, const float* skip) {
  if (skip && *skip != 0.0f) return;
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < t.count) *t.slab[i].step += 1.0f;
}

// The loaded words of the fp32 values of parameters.
struct PackedValues {
  Packed all, low;  // with remainders, all is the high half
};

// Whether values are kept only in bf16, and rounded stochastically.
template <class Entry>
__device__ __forceinline__ bool at_random(const Types& types) {
  return kPlaced<Entry> && types.mode == kRandom;
}

template <class Entry>
__device__ __forceinline__ PackedValues load_values(const Entry& slab, const Types& types, int64_t i, int n) {
  if (types.mode == kRemainder)
    return {load_four<uint2, uint16_t>(slab.p, i, n), load_four<uint2, uint16_t>(slab.aux, i, n)};
  return {load(types.mode == kMaster ? slab.aux : slab.p, at_random<Entry>(types) ? kBfloat16 : kFloat, i, n), {}};
}

__device__ __forceinline__ void merge_four(const Packed& high, const Packed& low, float (&w)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; k++) w[k] = merge(half_of(high, k), (int16_t)half_of(low, k));
}

template <class Entry>
__device__ __forceinline__ void to_values(const PackedValues& from, const Types& types, float (&w)[kVector]) {
  if (types.mode == kRemainder) merge_four(from.all, from.low, w);
  else to_floats(from.all, at_random<Entry>(types) ? kBfloat16 : kFloat, w);
}

template <class Entry>
__device__ __forceinline__ void store_values(const Entry& slab, const Types& types, uint32_t salt, int64_t i, int n,
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
    return;
  }
  if constexpr (kPlaced<Entry>) {
    if (types.mode == kRandom) {
      int64_t row = i / slab.place.inner, column = i % slab.place.inner;
#pragma unroll  // an index that is not a constant would put these arrays, in each mode, into local memory
      for (int k = 0; k < kVector; k++) {
        if (k >= n) continue;
        const uint64_t here = (uint64_t)(slab.place.base + row * slab.place.stride + column);
        high[k] = to_bf16_at_random(w[k], salt, (uint32_t)here, (uint32_t)(here >> 32));
        if (++column == slab.place.inner) column = 0, row++;
      }
      store_four<ushort4>(slab.p, i, n, high);
      return;
    }
  }
  if (types.mode == kMaster) store(slab.aux, kFloat, i, n, w);
  store(slab.p, types.p, i, n, w);
}

// Computes what the threads of a block share for one tensor; all of them call it when they reach that tensor. Loads
// that they issued before may still be pending.
template <class Formula, class Entry>
__device__ __forceinline__ void prepare(const Entry& slab, const Settings& settings, Scalars& scalars, uint32_t& salt) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const double now = *slab.step;
    scalars = Formula::scalars(settings, now);
    if constexpr (kPlaced<Entry>) salt = mix(mix((uint32_t)slab.place.key) ^ (uint32_t)(int64_t)now);
  }
  __syncthreads();
}

template <class Formula, class Entry>
__global__ void __launch_bounds__(kThreads)
    step(const __grid_constant__ Table<Entry> t, const Types types, const Settings settings, const float* gscale,
         const float* skip) {
  if (skip && *skip != 0.0f) return;
  __shared__ Scalars scalars;
  __shared__ uint32_t salt;
  const float scale = gscale ? *gscale : 1.0f;
  for_elements(t, [&](int, const Entry& slab, int64_t i, int n, bool another) {
    const Packed some_g = load(slab.g, types.g, i, n), some_m = load(slab.m, types.m, i, n);
    Packed some_v = {};
    if (Formula::kMoments == 2) some_v = load(slab.v, types.m, i, n);
    const PackedValues some_w = load_values(slab, types, i, n);
    if (another) prepare<Formula>(slab, settings, scalars, salt);
    float g[kVector], w[kVector], m[kVector], v[kVector] = {};
    to_floats(some_g, types.g, g);
    to_floats(some_m, types.m, m);
    if (Formula::kMoments == 2) to_floats(some_v, types.m, v);
    to_values<Entry>(some_w, types, w);
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

// A warp takes a block of 128, four elements per thread; a unit has one block per warp.
static_assert(kQuantBlock == 32 * kVector, "a warp takes a block");
constexpr int kWarps = kThreads / 32;

MC_INLINE int64_t quant_blocks(const Slab& slab, int64_t per_row) { return slab.n / slab.width * per_row; }

MC_INLINE int64_t quant_blocks_of_a_row(const Slab& slab) { return (slab.width + kQuantBlock - 1) / kQuantBlock; }

__global__ void __launch_bounds__(kThreads)
    step8(const __grid_constant__ Table<Slab> t, const Types types, const Settings settings, const float* gscale,
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
      to_values<Slab>(some_w, types, w);
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

// Here a unit is a chunk, because the order of sums must depend only on the sizes.
__global__ void __launch_bounds__(kThreads) squares(const __grid_constant__ Table<Memory> t, double* partial) {
  __shared__ double sums[kThreads];
  for_units(t, [&](int index, int64_t unit, bool) {
    const Memory& slab = t.slab[index];
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

__global__ void __launch_bounds__(kThreads) cast(const __grid_constant__ Table<Memory> t, const float* scale) {
  const float factor = scale ? *scale : 1.0f;
  for_elements(t, [&](int index, const Memory& slab, int64_t i, int n, bool) {
    float x[kVector];
    to_floats(load(slab.g, t.second_type[index], i, n), t.second_type[index], x);
    if (factor != 1.0f) {  // a product with 1 would flush denormals to zero
#pragma unroll
      for (int k = 0; k < kVector; k++) x[k] *= factor;
    }
    store(slab.p, t.first_type[index], i, n, x);
  });
}

__global__ void __launch_bounds__(kThreads) take_apart(const __grid_constant__ Table<Memory> t) {
  for_elements(t, [&](int, const Memory& slab, int64_t i, int n, bool) {
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

__global__ void __launch_bounds__(kThreads) put_together(const __grid_constant__ Table<Memory> t) {
  for_elements(t, [&](int, const Memory& slab, int64_t i, int n, bool) {
    float w[kVector];
    merge_four(load_four<uint2, uint16_t>(slab.p, i, n), load_four<uint2, uint16_t>(slab.m, i, n), w);
    store(slab.aux, kFloat, i, n, w);
  });
}

int64_t units(const Slab& slab) { return (slab.n + kUnit - 1) / kUnit; }

int64_t units_of_8_bits(const Slab& slab) {
  return slab.n ? (quant_blocks(slab, quant_blocks_of_a_row(slab)) + kWarps - 1) / kWarps : 0;
}

int64_t chunks(const Slab& slab) { return (slab.n + kChunk - 1) / kChunk; }

// Cuts the list into tables, with the units of each tensor, and calls work(table), which returns 0 or an error, for
// each.
template <class Entry, class Work>
int for_tables(const Slab* slabs, const int* first_type, const int* second_type, int64_t count, const Work& work,
               int64_t (*units_of)(const Slab&) = units) {
  constexpr int kMost = Table<Entry>::kTensors;
  for (int64_t begin = 0; begin < count; begin += kMost) {
    Table<Entry> t;
    t.count = (int)(count - begin < kMost ? count - begin : kMost);
    t.first[0] = 0;
    for (int i = 0; i < t.count; i++) {
      t.slab[i] = slabs[begin + i];
      t.first_type[i] = (uint8_t)(first_type ? first_type[begin + i] : 0);
      t.second_type[i] = (uint8_t)(second_type ? second_type[begin + i] : 0);
      t.first[i + 1] = t.first[i] + (uint32_t)units_of(slabs[begin + i]);
    }
    if (const int error = work(t)) return error;
  }
  return 0;
}

template <class Entry>
auto step_of(int rule) {
  return rule == kAdamW ? step<AdamW, Entry> : rule == kLion ? step<Lion, Entry> : step<Momentum, Entry>;
}

}  // namespace

int cuda_step(int rule, const Slab* slabs, int64_t count, Types types, Settings settings, const float* gscale,
              const float* skip, void* stream) {
  const auto run = [&](auto entry, auto kernel, int64_t (*units_of)(const Slab&)) {
    using Entry = decltype(entry);
    return for_tables<Entry>(slabs, nullptr, nullptr, count, [&](const Table<Entry>& t) {
      if (const int error = launch(stream, (t.count + 127) / 128, 128, count_up<Entry>, t, skip)) return error;
      return launch(stream, blocks(t.first[t.count]), kThreads, kernel, t, types, settings, gscale, skip);
    }, units_of);
  };
  if (rule == kAdamW8) return run(Slab{}, step8, units_of_8_bits);
  return types.mode == kRandom ? run(Slab{}, step_of<Slab>(rule), units) : run(Memory{}, step_of<Memory>(rule), units);
}

int64_t cuda_chunks(const int64_t* sizes, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; i++) chunks += (sizes[i] + kChunk - 1) / kChunk;
  return chunks;
}

int cuda_squares(const Slab* slabs, const int* types, int64_t count, double* partial, double* out, void* stream) {
  int64_t done = 0;
  const int error = for_tables<Memory>(slabs, types, nullptr, count, [&](const Table<Memory>& t) {
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
  return for_tables<Memory>(slabs, to, from, count, [&](const Table<Memory>& t) {
    return launch(stream, blocks(t.first[t.count]), kThreads, cast, t, scale);
  });
}

int cuda_split(const Slab* slabs, int64_t count, void* stream) {
  return for_tables<Memory>(slabs, nullptr, nullptr, count, [&](const Table<Memory>& t) {
    return launch(stream, blocks(t.first[t.count]), kThreads, take_apart, t);
  });
}

int cuda_merge(const Slab* slabs, int64_t count, void* stream) {
  return for_tables<Memory>(slabs, nullptr, nullptr, count, [&](const Table<Memory>& t) {
    return launch(stream, blocks(t.first[t.count]), kThreads, put_together, t);
  });
}

}  // namespace modelcenter
