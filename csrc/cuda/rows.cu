// Norms of rows, and the sums of columns. A thread holds 8 numbers of a row in registers, so that a row is read once;
// what is summed over rows is summed by each thread over the rows of its block, and then over the blocks by a second
// kernel. These are tested against float64, not bit for bit.
#include "rows.h"

#include <cuda_runtime.h>
#include <math.h>

#include <type_traits>

#include "../core/numbers.h"
#include "device.h"

namespace modelcenter {
namespace {

constexpr int kPer = 8;  // numbers of a thread
constexpr int kWarp = 32;
constexpr int kMost = 1024;            // threads of a block, which hold the longest row
constexpr int kForwardThreads = 128;   // of a block with several short rows
constexpr int kBackwardThreads = 512;  // of such a block in backward, where each block writes sums
constexpr int kAtOnce = 2;             // rows that forward loads before it waits for one
static_assert(kLongestRow == (int64_t)kMost * kPer, "a block holds the longest row");

// 8 numbers as they lie in memory.
template <int kType>
struct Packed {
  uint32_t word[kType == kFloat ? 8 : 4];
};

// Which numbers of a row of n are a thread's, one of `threads`: 8 neighbours, which it moves 16 bytes at a time. Where
// rows are not aligned it moves single numbers, beside those of the next thread.
template <bool kAligned>
struct Place {
  int first, step, count;
  __device__ Place(int n, int thread, int threads) : first(kAligned ? thread * kPer : thread), step(threads), count(0) {
    if (first < n) count = kAligned ? kPer : (n - first + threads - 1) / threads;
  }
};

template <int kType, bool kAligned>
__device__ __forceinline__ Packed<kType> load(const void* row, const Place<kAligned>& at) {
  constexpr int kWords = kType == kFloat ? 8 : 4;
  Packed<kType> found = {};
  if constexpr (kAligned) {
    if (at.count == 0) return found;
    const uint4* const from = (const uint4*)row + at.first / kPer * (kWords / 4);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = from[i / 4];
      found.word[i] = four.x, found.word[i + 1] = four.y, found.word[i + 2] = four.z, found.word[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPer; k++) {
      if (k >= at.count) continue;
      const int column = at.first + k * at.step;
      if (kType == kFloat) found.word[k % kWords] = ((const uint32_t*)row)[column];
      else found.word[k / 2] |= (uint32_t)((const uint16_t*)row)[column] << (k % 2 * 16);
    }
  }
  return found;
}

template <int kType, bool kAligned>
__device__ __forceinline__ void store(void* row, const Place<kAligned>& at, const Packed<kType>& x) {
  constexpr int kWords = kType == kFloat ? 8 : 4;
  if constexpr (kAligned) {
    if (at.count == 0) return;
    uint4* const to = (uint4*)row + at.first / kPer * (kWords / 4);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint4 four;
      four.x = x.word[i], four.y = x.word[i + 1], four.z = x.word[i + 2], four.w = x.word[i + 3];
      to[i / 4] = four;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPer; k++) {
      if (k >= at.count) continue;
      const int column = at.first + k * at.step;
      if (kType == kFloat) ((uint32_t*)row)[column] = x.word[k % kWords];
      else ((uint16_t*)row)[column] = (uint16_t)(x.word[k / 2] >> (k % 2 * 16));
    }
  }
}

template <int kType>
__device__ __forceinline__ void unpack(const Packed<kType>& from, float (&x)[kPer]) {
#pragma unroll
  for (int k = 0; k < kPer; k++) {
    const uint32_t word = from.word[kType == kFloat ? k : k / 2];
    if (kType == kFloat) x[k] = float_of(word);
    else if (kType == kHalf) x[k] = of_fp16((uint16_t)(k % 2 ? word >> 16 : word));
    else x[k] = float_of(k % 2 ? word & 0xFFFF0000u : word << 16);
  }
}

template <int kType>
__device__ __forceinline__ Packed<kType> pack(const float (&x)[kPer]) {
  Packed<kType> to;
  if (kType == kFloat) {
#pragma unroll
    for (int k = 0; k < kPer; k++) to.word[k % (kType == kFloat ? 8 : 4)] = bits_of(x[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kPer; k += 2) to.word[k / 2] = pair<kType>(x[k], x[k + 1]);
  }
  return to;
}

// Threads of a block work on rows in groups of as many warps as a row needs.
struct Group {
  int threads, number, thread;
  __device__ explicit Group(int threads)
      : threads(threads), number((int)threadIdx.x / threads), thread((int)threadIdx.x % threads) {}
};

// The sums over a group's threads, the same for all of them. `room` is not that of the call before, which may be read.
template <int kSums>
__device__ __forceinline__ void add_up_group(float (&sum)[kSums], float (&room)[kMost / kWarp][kSums],
                                             const Group& group) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes; lanes /= 2)
#pragma unroll
    for (int i = 0; i < kSums; i++) sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], lanes);
  if (group.threads == kWarp) return;
  const int warp = (int)threadIdx.x / kWarp, first = warp - group.thread / kWarp;
  if (threadIdx.x % kWarp == 0)
#pragma unroll
    for (int i = 0; i < kSums; i++) room[warp][i] = sum[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; i++) sum[i] = 0.0f;
  for (int w = 0; w < group.threads / kWarp; w++)
#pragma unroll
    for (int i = 0; i < kSums; i++) sum[i] += room[first + w][i];
}

template <int kType, bool kCentered, bool kAligned>
__global__ void __launch_bounds__(kMost)
    norm(const void* x, const void* weight, const void* bias, void* out, float* stats, int64_t rows, int n, int threads,
         float inverse, float eps) {
  __shared__ float room[2][kMost / kWarp][kAtOnce];
  constexpr int64_t kSize = kType == kFloat ? 4 : 2;
  const Group group(threads);
  const Place<kAligned> at(n, group.thread, threads);
  const Packed<kType> w = load<kType>(weight, at);
  Packed<kType> b = {};
  if (kCentered) b = load<kType>(bias, at);
  const int64_t of_block = (int64_t)((int)blockDim.x / threads) * kAtOnce;
  int round = 0;
  for (int64_t begin = blockIdx.x * of_block; begin < rows; begin += gridDim.x * of_block, round ^= 1) {
    const int64_t first = begin + group.number * kAtOnce;
    Packed<kType> packed[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      packed[i] = {};
      if (first + i < rows) packed[i] = load<kType>((const char*)x + (first + i) * n * kSize, at);
    }
    float v[kAtOnce][kPer], mean[kAtOnce] = {}, square[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) unpack<kType>(packed[i], v[i]);
    if (kCentered) {
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
#pragma unroll
        for (int k = 0; k < kPer; k++) mean[i] += v[i][k];
      add_up_group(mean, room[0], group);
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        mean[i] *= inverse;
#pragma unroll
        for (int k = 0; k < kPer; k++) v[i][k] = k < at.count ? v[i][k] - mean[i] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int k = 0; k < kPer; k++) square[i] = fmaf(v[i][k], v[i][k], square[i]);
    add_up_group(square, room[kCentered ? 1 : round], group);
    float scale[kPer], shift[kPer];
    unpack<kType>(w, scale);
    unpack<kType>(b, shift);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (first + i >= rows) continue;
      const float rstd = rsqrtf(fmaf(square[i], inverse, eps));
      float y[kPer];
#pragma unroll
      for (int k = 0; k < kPer; k++) y[k] = v[i][k] * rstd;
      if (!kCentered) unpack<kType>(pack<kType>(y), y);
#pragma unroll
      for (int k = 0; k < kPer; k++) y[k] = kCentered ? fmaf(y[k], scale[k], shift[k]) : y[k] * scale[k];
      store<kType>((char*)out + (first + i) * n * kSize, at, pack<kType>(y));
      if (group.thread) continue;
      if (kCentered) stats[first + i] = mean[i];
      stats[(kCentered ? rows : 0) + first + i] = rstd;
    }
  }
}

// sums: of each block those over its rows for the weight and, if centered, the bias; null where they are not wanted.
template <int kType, bool kCentered, bool kAligned>
__global__ void __launch_bounds__(kMost)
    norm_backward(const void* grad, const void* x, const void* weight, const float* stats, void* dx, float* sums,
                  int64_t rows, int n, int threads, float inverse) {
  constexpr int kSums = kCentered ? 2 : 1;
  __shared__ float room[2][kMost / kWarp][kSums];
  __shared__ float of_groups[kPer][kBackwardThreads];
  constexpr int64_t kSize = kType == kFloat ? 4 : 2;
  const Group group(threads);
  const Place<kAligned> at(n, group.thread, threads);
  const int groups = (int)blockDim.x / threads;
  const Packed<kType> packed_weight = load<kType>(weight, at);
  float total[kSums][kPer] = {};
  const int64_t begin = rows * blockIdx.x / gridDim.x, end = rows * (blockIdx.x + 1) / gridDim.x;
  int round = 0;
  for (int64_t of_block = begin; of_block < end; of_block += groups, round ^= 1) {
    const int64_t row = of_block + group.number;
    const bool here = row < end;
    Packed<kType> packed_x = {}, packed_grad = {};
    float mean = 0.0f, rstd = 0.0f;
    if (here) {
      packed_x = load<kType>((const char*)x + row * n * kSize, at);
      packed_grad = load<kType>((const char*)grad + row * n * kSize, at);
      if (kCentered) mean = stats[row];
      rstd = stats[(kCentered ? rows : 0) + row];
    }
    float normal[kPer], g[kPer], w[kPer], along[kSums] = {};  // the means of g along the normalized row, and of g
    unpack<kType>(packed_x, normal);
    unpack<kType>(packed_grad, g);
    // Where registers would be short, it is read again.
    unpack<kType>(kAligned || kType == kFloat ? packed_weight : load<kType>(weight, at), w);
#pragma unroll
    for (int k = 0; k < kPer; k++) {
      normal[k] = (normal[k] - mean) * rstd;
      total[0][k] = fmaf(g[k], normal[k], total[0][k]);
      if (kCentered) total[kSums - 1][k] += g[k];
      g[k] *= w[k];  // zero behind the end of a row, as the weight is
      along[0] = fmaf(g[k], normal[k], along[0]);
      if (kCentered) along[kSums - 1] += g[k];
    }
    add_up_group(along, room[round], group);
    if (!here) continue;
    const float slope = along[0] * inverse, shift = kCentered ? along[kSums - 1] * inverse : 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; k++) g[k] = rstd * (g[k] - fmaf(normal[k], slope, shift));
    store<kType>((char*)dx + row * n * kSize, at, pack<kType>(g));
  }
  if (!sums) return;
#pragma unroll
  for (int i = 0; i < kSums; i++) {
    if (groups > 1) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kPer; k++) of_groups[k][threadIdx.x] = total[i][k];
      __syncthreads();
      if (group.number == 0)
        for (int other = 1; other < groups; other++)
#pragma unroll
          for (int k = 0; k < kPer; k++) total[i][k] += of_groups[k][other * threads + group.thread];
    }
    if (group.number == 0)
      store<kFloat>(sums + ((int64_t)blockIdx.x * kSums + i) * n, at, pack<kFloat>(total[i]));
  }
}

constexpr int kTile = kWarp * kPer;  // columns that a block sums
constexpr int kWarps = 8;            // of it, each of which takes other rows
constexpr int kRows = 32;            // of a block at the least

template <int kType, bool kAligned>
__global__ void __launch_bounds__(kWarps * kWarp, 4)
    sum_columns(const void* x, int64_t stride, float* sums, int64_t rows, int64_t n, int64_t tiles) {
  __shared__ float of_warps[kPer][kWarps * kWarp];
  constexpr int64_t kSize = kType == kFloat ? 4 : 2;
  constexpr int kLoads = kAligned ? 4 : 1;  // rows of a warp on their way at a time
  const int64_t column = blockIdx.x % tiles * kTile, part = blockIdx.x / tiles, parts = gridDim.x / tiles;
  const Place<kAligned> at((int)(n - column < kTile ? n - column : kTile), (int)threadIdx.x % kWarp, kWarp);
  const int64_t end = rows * (part + 1) / parts;
  const char* const base = (const char*)x + column * kSize;
  float total[kPer] = {};
  for (int64_t row = rows * part / parts + threadIdx.x / kWarp; row < end; row += kLoads * kWarps) {
    Packed<kType> packed[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      packed[i] = {};
      if (row + i * kWarps < end) packed[i] = load<kType>(base + (row + i * kWarps) * stride * kSize, at);
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      float v[kPer];
      unpack<kType>(packed[i], v);
#pragma unroll
      for (int k = 0; k < kPer; k++) total[k] += v[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kPer; k++) of_warps[k][threadIdx.x] = total[k];
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  for (int warp = 1; warp < kWarps; warp++)
#pragma unroll
    for (int k = 0; k < kPer; k++) total[k] += of_warps[k][warp * kWarp + threadIdx.x];
  store<kFloat>(sums + part * n + column, at, pack<kFloat>(total));
}

constexpr int kColumns = 32;  // that a block of the second kernel sums

// The sums of the columns of sums (count, width): the first n into `first`, those behind into `second`.
__global__ void __launch_bounds__(kMost)
    add_up_blocks(const float* sums, int64_t count, int64_t width, void* first, void* second, int64_t n, int type) {
  __shared__ float of_rows[kMost / kColumns][kColumns];
  const int lane = (int)threadIdx.x % kColumns, start = (int)threadIdx.x / kColumns;
  const int64_t column = (int64_t)blockIdx.x * kColumns + lane;
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 4
    for (int64_t row = start; row < count; row += kMost / kColumns) sum += sums[row * width + column];
  }
  of_rows[start][lane] = sum;
  __syncthreads();
  if (start || column >= width) return;
#pragma unroll 8
  for (int row = 1; row < kMost / kColumns; row++) sum += of_rows[row][lane];
  void* const out = column < n ? first : second;
  const int64_t at = column < n ? column : column - n;
  if (type == kFloat) ((float*)out)[at] = sum;
  else ((uint16_t*)out)[at] = type == kBfloat16 ? to_bf16(sum) : to_fp16(sum);
}

// work(type, aligned) with the type of these rows, and whether they are aligned, as constants.
template <class Work>
int with_constants(const RowsOf& of, const Work& work) {
  const auto with_type = [&](auto aligned) {
    if (of.type == kFloat) return work(std::integral_constant<int, kFloat>(), aligned);
    if (of.type == kBfloat16) return work(std::integral_constant<int, kBfloat16>(), aligned);
    return work(std::integral_constant<int, kHalf>(), aligned);
  };
  return of.aligned ? with_type(std::true_type()) : with_type(std::false_type());
}

// Threads for a row of n numbers: whole warps.
int threads_of(int64_t n) { return (int)((n + kTile - 1) / kTile) * kWarp; }

int groups_of(int threads, int at_most) { return threads < at_most ? at_most / threads : 1; }

// Blocks of norm_backward: as many as run at a time, unless there are fewer rows.
int64_t backward_blocks(const RowsOf& of) {
  const int threads = threads_of(of.n), groups = groups_of(threads, kBackwardThreads);
  const int64_t wanted = (of.rows + groups - 1) / groups, most = processors() * (kMost / (threads * groups));
  return wanted < most ? wanted : most;
}

int64_t tiles_of(const RowsOf& of) { return (of.n + kTile - 1) / kTile; }

// Into how many parts the rows are cut: for as many blocks as run at a time.
int64_t parts_of(const RowsOf& of) {
  const int64_t wanted = (of.rows + kRows - 1) / kRows, room = processors() * 4 / tiles_of(of);
  const int64_t most = room > 1 ? room : 1;
  return wanted < most ? wanted : most;
}

}  // namespace

int cuda_norm(const RowsOf& of, const void* x, const void* weight, const void* bias, void* out, float* stats, float eps,
              void* stream) {
  const int threads = threads_of(of.n), groups = groups_of(threads, kForwardThreads);
  const int64_t wanted = (of.rows + groups * kAtOnce - 1) / (groups * kAtOnce), most = (int64_t)1 << 30;
  return with_constants(of, [&](auto type, auto aligned) {
    const auto kernel = bias ? norm<type.value, true, aligned.value> : norm<type.value, false, aligned.value>;
    return launch(stream, wanted < most ? wanted : most, threads * groups, kernel, x, weight, bias, out, stats, of.rows,
                  (int)of.n, threads, 1.0f / (float)of.n, eps);
  });
}

int64_t cuda_norm_room(const RowsOf& of, bool centered) { return backward_blocks(of) * of.n * (centered ? 2 : 1); }

int cuda_norm_backward(const RowsOf& of, bool centered, const void* grad, const void* x, const void* weight,
                       const float* stats, void* dx, void* dweight, void* dbias, float* room, void* stream) {
  const int threads = threads_of(of.n), groups = groups_of(threads, kBackwardThreads);
  const int64_t blocks = backward_blocks(of), width = of.n * (centered ? 2 : 1);
  const int error = with_constants(of, [&](auto type, auto aligned) {
    const auto kernel = centered ? norm_backward<type.value, true, aligned.value>
                                 : norm_backward<type.value, false, aligned.value>;
    return launch(stream, blocks, threads * groups, kernel, grad, x, weight, stats, dx, dweight ? room : nullptr,
                  of.rows, (int)of.n, threads, 1.0f / (float)of.n);
  });
  if (error || !dweight) return error;
  return launch(stream, (width + kColumns - 1) / kColumns, kMost, add_up_blocks, room, blocks, width, dweight, dbias,
                of.n, of.type);
}

int64_t cuda_column_sums_room(const RowsOf& of) { return parts_of(of) * of.n; }

int cuda_column_sums(const RowsOf& of, const void* x, int64_t stride, void* out, float* room, void* stream) {
  const int64_t tiles = tiles_of(of), parts = parts_of(of);
  const int error = with_constants(of, [&](auto type, auto aligned) {
    return launch(stream, tiles * parts, kWarps * kWarp, sum_columns<type.value, aligned.value>, x, stride, room,
                  of.rows, of.n, tiles);
  });
  if (error) return error;
  return launch(stream, (of.n + kColumns - 1) / kColumns, kMost, add_up_blocks, room, parts, of.n, out, (void*)nullptr,
                of.n, of.type);
}

}  // namespace modelcenter
