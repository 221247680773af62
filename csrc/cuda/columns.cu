// The sums of the columns of a matrix: the gradients of biases. Tested against float64, not bit for bit.
#include "columns.h"

#include "row.h"

namespace modelcenter {
namespace {

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

int64_t tiles_of(const Columns& of) { return (of.n + kTile - 1) / kTile; }

// Into how many parts the rows are cut: for as many blocks as run at a time.
int64_t parts_of(const Columns& of) {
  const int64_t wanted = (of.rows + kRows - 1) / kRows, room = processors() * 4 / tiles_of(of);
  const int64_t most = room > 1 ? room : 1;
  return wanted < most ? wanted : most;
}

}  // namespace

int64_t cuda_column_sums_room(const Columns& of) { return parts_of(of) * of.n; }

int cuda_column_sums(const Columns& of, void* out, float* room, void* stream) {
  const int64_t tiles = tiles_of(of), parts = parts_of(of);
  const bool aligned = on_16_bytes(of.n, {of.x}) && of.stride * size_of(of.type) % 16 == 0;
  const int error = with_constants(of.type, aligned, [&](auto type, auto is_aligned) {
    return launch(stream, tiles * parts, kWarps * kWarp, sum_columns<type.value, is_aligned.value>, of.x, of.stride,
                  room, of.rows, of.n, tiles);
  });
  if (error) return error;
  return add_up(room, parts, of.n, out, nullptr, of.n, of.type, stream);
}

}  // namespace modelcenter
