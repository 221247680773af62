// Dropout, which draws its masks anew wherever it needs them (core/random.h), with the CPU's bits, as it is compiled
// like kernels.cu.
#include "dropout.h"

#include "device.h"

namespace modelcenter {
namespace {

constexpr int kThreads = 256;

// The walk of dropout: groups of 16 threads, one counter each, take the blocks of 128 channels of all rows in turn.
struct Walk {
  int64_t rows, channels;
  uint32_t per_row;             // blocks in which a row has channels
  uint32_t rows_on, blocks_on;  // steps from one block of a group to its next
};

constexpr int kGroups = kThreads / kDropoutLanes;  // groups of threads

struct Step {
  int64_t row;
  uint32_t block;  // in the row

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

// The 8 times 16 bits of this thread's counter for a block.
__device__ __forceinline__ void draw(const Draw& d, const Step& at, uint32_t (&words)[4]) {
  const uint32_t block = (uint32_t)(d.first_channel / kDropoutBlock) + at.block;
  const int64_t token = d.tokens ? d.tokens[at.row] : d.first_token + at.row;
  philox(d.key_low, d.key_high, block * kDropoutLanes + threadIdx.x % kDropoutLanes, d.site, (uint64_t)token, words);
}

// The channels of a counter are 16 apart, so that neighbouring threads have neighbouring channels.
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

// 16 bytes with the bits of numbers.h, also for NaNs.
template <int kType>
__device__ __forceinline__ uint4 pack_exactly(const float (&x)[kOf16Bytes<kType>]) {
  if constexpr (kType != kFloat) {
    bool number = true;
#pragma unroll
    for (int k = 0; k < kOf16Bytes<kType>; k++) number = number && x[k] == x[k];
    if (!number) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; k++) words[k] = exact_pair<kType>(x[2 * k], x[2 * k + 1]);
      return of_words(words);
    }
  }
  return pack_16_bytes<kType>(x);
}

// `drop` for rows whose blocks begin at multiples of 16 bytes, which a thread moves at a time. The random bits of its
// numbers are drawn by its neighbours, and exchanged as one bit per number.
template <int kType>
__global__ void __launch_bounds__(kThreads)
    drop_vectors(const Draw d, const Walk walk, const void* x, const void* residual, void* out) {
  constexpr int kNumbers = kOf16Bytes<kType>;
  constexpr int kParts = 8 / kNumbers;  // of a block; a thread has 16 bytes of each
  constexpr int kSlots = 8 / kParts;    // of 16 channels in a part
  const int64_t skipped = d.first_channel % kDropoutBlock;
  const int lane = threadIdx.x % kDropoutLanes, half = threadIdx.x % 32 / kDropoutLanes;
  const int slot = lane * kNumbers / kDropoutLanes;
  const int shift = half * kDropoutLanes + lane * kNumbers % kDropoutLanes;
  const uint32_t limit = d.threshold << 16;
  // Both halves of a warp continue until the first half, which is never behind the second, is done.
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
      unpack_16_bytes<kType>(found[part], y);
      unpack_16_bytes<kType>(more[part], add);
#pragma unroll
      for (int k = 0; k < kNumbers; k++) {
        y[k] = kept >> k & 1u ? y[k] * d.scale : 0.0f;
        if (residual) y[k] = add[k] + y[k];
      }
      __stcg((uint4*)out + i[part], pack_exactly<kType>(y));
    }
  }
}

}  // namespace

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
