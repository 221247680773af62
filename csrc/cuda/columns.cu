// Column sums of a matrix: the gradients of biases. Tested against float64, not bit for bit.
#include "columns.h"

#include "row.h"

namespace modelcenter {
namespace {

template <int kType, bool kAligned>
__global__ void __launch_bounds__(kWarps * kWarp, kBlocks)
    sum_columns(const void* x, int64_t stride, float* sums, int64_t rows, int64_t n, int64_t tiles) {
  constexpr int64_t kSize = kType == kFloat ? 4 : 2;
  constexpr int kLoads = kAligned ? 4 : 1;  // rows that a warp loads at a time
  const Part<kAligned> part(rows, n, tiles);
  const char* const base = (const char*)x + part.column * kSize;
  float total[kPer] = {};
  for (int64_t row = part.begin + threadIdx.x / kWarp; row < part.end; row += kLoads * kWarps) {
    Packed<kType> packed[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      packed[i] = {};
      if (row + i * kWarps < part.end) packed[i] = load<kType>(base + (row + i * kWarps) * stride * kSize, part.at);
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      float v[kPer];
      unpack<kType>(packed[i], v);
#pragma unroll
      for (int k = 0; k < kPer; k++) total[k] += v[k];
    }
  }
  store_sums(total, part, sums, n);
}

}  // namespace

int64_t cuda_column_sums_room(const Columns& of) { return parts_of(of.rows, of.n) * of.n; }

int cuda_column_sums(const Columns& of, void* out, float* room, void* stream) {
  const int64_t tiles = tiles_of(of.n), parts = parts_of(of.rows, of.n);
  const bool aligned = on_16_bytes(of.n, {of.x}) && of.stride * size_of(of.type) % 16 == 0;
  const int error = with_constants(of.type, aligned, [&](auto type, auto is_aligned) {
    return launch(stream, tiles * parts, kWarps * kWarp, sum_columns<type.value, is_aligned.value>, of.x, of.stride,
                  room, of.rows, of.n, tiles);
  });
  if (error) return error;
  return add_up(room, parts, of.n, out, nullptr, of.n, of.type, stream);
}

}  // namespace modelcenter
