// Shared by kernels over the rows of a matrix: 8 elements of a row in a thread's registers, so that a row is read once;
// column sums; and the sums over blocks of what each block has summed over its rows.
#pragma once
#include <initializer_list>
#include <type_traits>

#include "device.h"

namespace modelcenter {
namespace {

constexpr int kPer = 8;  // elements per thread
constexpr int kWarp = 32;
constexpr int kMost = 1024;  // most threads of a block

// 8 elements as in memory.
template <int kType>
struct Packed {
  static constexpr int kWords = kPer / kOfWord<kType>;
  uint32_t word[kWords];
};

// The elements of a row of n that belong to a thread, one of `threads`: 8 adjacent ones, moved 16 bytes at a time. If
// rows are not aligned, it moves single elements, next to those of the next thread.
template <bool kAligned>
struct Place {
  int first, step, count;
  __device__ Place(int n, int thread, int threads) : first(kAligned ? thread * kPer : thread), step(threads), count(0) {
    if (first < n) count = kAligned ? kPer : (n - first + threads - 1) / threads;
  }
};

template <int kType, bool kAligned>
__device__ __forceinline__ Packed<kType> load(const void* row, const Place<kAligned>& at) {
  constexpr int kWords = Packed<kType>::kWords;
  Packed<kType> found = {};
  if constexpr (kAligned) {
    if (at.count == 0) return found;
    const uint4* const from = (const uint4*)row + at.first / kPer * (kWords / 4);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) words_of(from[i / 4], found.word + i);
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
  constexpr int kWords = Packed<kType>::kWords;
  if constexpr (kAligned) {
    if (at.count == 0) return;
    uint4* const to = (uint4*)row + at.first / kPer * (kWords / 4);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) to[i / 4] = of_words(x.word + i);
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
  unpack<kType>(from.word, x);
}

template <int kType>
__device__ __forceinline__ Packed<kType> pack(const float (&x)[kPer]) {
  Packed<kType> to;
  pack<kType>(x, to.word);
  return to;
}

constexpr int kColumns = 32;  // columns that a block of the second kernel sums

// Sums the columns of sums (count, width): the first n into `first`, the others into `second`.
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
  set_number(out, type, at, sum);
}

// Launches add_up_blocks.
inline int add_up(const float* sums, int64_t count, int64_t width, void* first, void* second, int64_t n, int type,
                  void* stream) {
  return launch(stream, (width + kColumns - 1) / kColumns, kMost, add_up_blocks, sums, count, width, first, second, n,
                type);
}

// Column sums: a block takes a tile of columns and a part of the rows, which its warps divide among themselves.
constexpr int kTile = kWarp * kPer;  // columns
constexpr int kWarps = 8;
constexpr int kRows = 32;  // the least number of rows of a block
constexpr int kBlocks = 4;  // on a multiprocessor

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

// The number of parts into which rows are cut, for as many blocks as run at a time. There must be columns.
inline int64_t parts_of(int64_t rows, int64_t n) {
  const int64_t wanted = (rows + kRows - 1) / kRows, room = processors() * kBlocks / tiles_of(n);
  const int64_t most = room > 1 ? room : 1;
  return wanted < most ? wanted : most;
}

// The part of a matrix (rows, n) that belongs to a block.
template <bool kAligned>
struct Part {
  int64_t column, number, begin, end;  // first column, number of the part, rows [begin, end)
  Place<kAligned> at;

  __device__ Part(int64_t rows, int64_t n, int64_t tiles)
      : column(blockIdx.x % tiles * kTile),
        number(blockIdx.x / tiles),
        begin(rows * number / (gridDim.x / tiles)),
        end(rows * (number + 1) / (gridDim.x / tiles)),
        at((int)(n - column < kTile ? n - column : kTile), (int)threadIdx.x % kWarp, kWarp) {}
};

// Adds the sums of a block's threads, and stores the result as a row of sums (parts, n).
template <bool kAligned>
__device__ __forceinline__ void store_sums(float (&total)[kPer], const Part<kAligned>& part, float* sums, int64_t n) {
  __shared__ float of_warps[kPer][kWarps * kWarp];
#pragma unroll
  for (int k = 0; k < kPer; k++) of_warps[k][threadIdx.x] = total[k];
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  for (int warp = 1; warp < kWarps; warp++)
#pragma unroll
    for (int k = 0; k < kPer; k++) total[k] += of_warps[k][warp * kWarp + threadIdx.x];
  store<kFloat>(sums + part.number * n + part.column, part.at, pack<kFloat>(total));
}

// Whether rows of n elements at these addresses can be moved 16 bytes at a time.
inline bool on_16_bytes(int64_t n, std::initializer_list<const void*> all) {
  bool fits = n % kPer == 0;
  for (const void* p : all) fits = fits && (uintptr_t)p % 16 == 0;
  return fits;
}

// Calls work(type, aligned) with both as constants.
template <class Work>
int with_constants(int type, bool aligned, const Work& work) {
  const auto with_type = [&](auto is_aligned) {
    if (type == kFloat) return work(std::integral_constant<int, kFloat>(), is_aligned);
    if (type == kBfloat16) return work(std::integral_constant<int, kBfloat16>(), is_aligned);
    return work(std::integral_constant<int, kHalf>(), is_aligned);
  };
  return aligned ? with_type(std::true_type()) : with_type(std::false_type());
}

}  // namespace
}  // namespace modelcenter
