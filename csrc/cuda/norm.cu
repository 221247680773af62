// Norms of rows, after the addition of a branch. A row is read once; sums over rows are taken by each thread over the
// rows of its block, and by a second kernel over the blocks. Norms are tested against float64, not bit for bit; sums
// with the branch, and masks, have the CPU's bits.
#include "norm.h"

#include <math.h>

#include "dropout.h"
#include "row.h"

namespace modelcenter {
namespace {

constexpr int kForwardThreads = 128;   // of a block with several short rows
constexpr int kBackwardThreads = 256;  // of such a block in backward, where each block writes sums
constexpr int kMostAtOnce = 2;         // rows of 16-bit numbers that forward loads at a time without a branch
constexpr int kShort = 256;            // threads of blocks that load rows while they sum others; more lack registers
constexpr int kForwardBlocks = 4;      // of these at a time on a multiprocessor
constexpr int kBackwardBlocks = 3;
static_assert(kLongestRow == (int64_t)kMost * kPer, "a block holds the longest row");

// The threads of a block process rows in groups of as many warps as a row needs.
struct Group {
  int threads, number, thread;
  __device__ explicit Group(int threads)
      : threads(threads), number((int)threadIdx.x / threads), thread((int)threadIdx.x % threads) {}
};

// The sums over a group's threads, for all of them. room: not that of the previous call, which may still be read.
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

// Which of this thread's 8 adjacent elements of a row dropout keeps, one bit each. All threads of a warp call it for
// the same row.
__device__ __forceinline__ uint32_t kept(const Draw& d, int64_t row, int thread) {
  const uint64_t token = (uint64_t)(d.tokens ? d.tokens[row] : d.first_token + row);
  uint32_t words[4], bits = 0;
  // A block of 128 channels belongs to 16 threads, which draw a counter each. A thread's counter decides elements of
  // all of them, so they exchange one bit per element.
  philox(d.key_low, d.key_high, (uint32_t)thread, d.site, token, words);
  const uint32_t limit = d.threshold << 16;
  const int lane = thread % kDropoutLanes;
#pragma unroll
  for (int slot = 0; slot < kPer; slot++) {
    const uint32_t word = slot % 2 ? words[slot / 2] : words[slot / 2] << 16;
    const uint32_t votes = __ballot_sync(0xFFFFFFFFu, word >= limit);
    bits = slot == lane / 2 ? votes : bits;
  }
  return bits >> (thread % kWarp - lane + lane % 2 * kPer) & 0xFFu;
}

// kAdds: whether there is a branch; rows are then aligned.
template <int kType, bool kCentered, bool kAligned, bool kAdds, int kBlock>
__global__ void __launch_bounds__(kBlock, kBlock == kShort ? kForwardBlocks : 1)
    norm(const NormJob job, int threads, float inverse) {
  constexpr int kAtOnce = kAdds || kType == kFloat ? 1 : kMostAtOnce;
  constexpr bool kAhead = kBlock == kShort;
  __shared__ float room[2][kMost / kWarp][kAtOnce];
  constexpr int64_t kSize = kType == kFloat ? 4 : 2;
  const int64_t rows = job.rows;
  const int n = (int)job.n;
  const Group group(threads);
  const Place<kAligned> at(n, group.thread, threads);
  const Packed<kType> w = load<kType>(job.weight, at);
  Packed<kType> b = {};
  if (kCentered) b = load<kType>(job.bias, at);
  const int64_t of_block = (int64_t)((int)blockDim.x / threads) * kAtOnce, step = gridDim.x * of_block;
  Packed<kType> packed[kAtOnce], branch[kAtOnce];
  const auto fetch = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      packed[i] = branch[i] = {};
      if (first + i >= rows) continue;
      packed[i] = load<kType>((const char*)job.x + (first + i) * n * kSize, at);
      if (kAdds) branch[i] = load<kType>((const char*)job.branch + (first + i) * n * kSize, at);
    }
  };
  int round = 0;
  if (kAhead) fetch(blockIdx.x * of_block + group.number * kAtOnce);
  for (int64_t begin = blockIdx.x * of_block; begin < rows; begin += step, round ^= 1) {
    const int64_t first = begin + group.number * kAtOnce;
    if (!kAhead) fetch(first);
    float v[kAtOnce][kPer], mean[kAtOnce] = {}, square[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      unpack<kType>(packed[i], v[i]);
      if (!kAdds || first + i >= rows) continue;
      const uint32_t bits = job.draw.threshold ? kept(job.draw, first + i, group.thread) : 0xFFu;
      float added[kPer];
      unpack<kType>(branch[i], added);
#pragma unroll
      for (int k = 0; k < kPer; k++) v[i][k] += bits >> k & 1u ? added[k] * job.draw.scale : 0.0f;
      const Packed<kType> sum = pack<kType>(v[i]);
      store<kType>((char*)job.sum + (first + i) * n * kSize, at, sum);
      unpack<kType>(sum, v[i]);
    }
    if (kAhead) fetch(first + step);
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
      const float rstd = rsqrtf(fmaf(square[i], inverse, job.eps));
      float y[kPer];
#pragma unroll
      for (int k = 0; k < kPer; k++) y[k] = v[i][k] * rstd;
      if (!kCentered) unpack<kType>(pack<kType>(y), y);
#pragma unroll
      for (int k = 0; k < kPer; k++) y[k] = kCentered ? fmaf(y[k], scale[k], shift[k]) : y[k] * scale[k];
      store<kType>((char*)job.out + (first + i) * n * kSize, at, pack<kType>(y));
      if (group.thread) continue;
      if (kCentered) job.stats[first + i] = mean[i];
      job.stats[(kCentered ? rows : 0) + first + i] = rstd;
    }
  }
}

// kAdds: whether there is an extra gradient, or, with aligned rows, dropout. sums: those of each block over its rows,
// for the weight and, if centered, the bias; null if not wanted.
template <int kType, bool kCentered, bool kAligned, bool kAdds, int kBlock>
__global__ void __launch_bounds__(kBlock, kBlock == kShort ? kBackwardBlocks : 1)
    norm_backward(const NormBackwardJob job, float* sums, int threads, float inverse) {
  constexpr int kSums = kCentered ? 2 : 1;
  constexpr bool kAhead = kBlock == kShort && kType != kFloat;
  // If registers are short, the weight is read again for each row.
  constexpr bool kKeepsWeight = !kAdds && (kAligned || kType == kFloat);
  __shared__ float room[2][kMost / kWarp][kSums];
  __shared__ float of_groups[kPer][kBackwardThreads];
  constexpr int64_t kSize = kType == kFloat ? 4 : 2;
  const int64_t rows = job.rows;
  const int n = (int)job.n;
  const Group group(threads);
  const Place<kAligned> at(n, group.thread, threads);
  const int groups = (int)blockDim.x / threads;
  Packed<kType> packed_weight = {};
  if (kKeepsWeight) packed_weight = load<kType>(job.weight, at);
  float total[kSums][kPer] = {};
  int64_t row = rows * blockIdx.x / gridDim.x;
  int left = (int)(rows * (blockIdx.x + 1) / gridDim.x - row), round = 0;
  struct Loaded {
    Packed<kType> x, grad, extra;
    float mean, rstd;
  };
  const auto fetch = [&](int64_t next, bool there) {
    Loaded found = {};
    if (there) {
      found.x = load<kType>((const char*)job.sum + next * n * kSize, at);
      found.grad = load<kType>((const char*)job.grad + next * n * kSize, at);
      if (kAhead && kAdds && job.extra) found.extra = load<kType>((const char*)job.extra + next * n * kSize, at);
      if (kCentered) found.mean = job.stats[next];
      found.rstd = job.stats[(kCentered ? rows : 0) + next];
    }
    return found;
  };
  row += group.number;
  Loaded ahead = {};
  if (kAhead) ahead = fetch(row, group.number < left);
  for (; left > 0; row += groups, left -= groups, round ^= 1) {
    const bool here = group.number < left;
    const Loaded now = kAhead ? ahead : fetch(row, here);
    float normal[kPer], g[kPer], w[kPer], along[kSums] = {};  // along: the means of g * normal, and of g
    unpack<kType>(now.x, normal);
    unpack<kType>(now.grad, g);
    const auto add_extra = [&] {
      float more[kPer];
      unpack<kType>(kAhead ? now.extra : load<kType>((const char*)job.extra + row * n * kSize, at), more);
#pragma unroll
      for (int k = 0; k < kPer; k++) g[k] += more[k];
    };
    if (kAdds && here && job.extra && !job.extra_of_sum) add_extra();
    unpack<kType>(kKeepsWeight ? packed_weight : load<kType>(job.weight, at), w);
#pragma unroll
    for (int k = 0; k < kPer; k++) {
      normal[k] = (normal[k] - now.mean) * now.rstd;
      total[0][k] = fmaf(g[k], normal[k], total[0][k]);
      if (kCentered) total[kSums - 1][k] += g[k];
      g[k] *= w[k];  // zero beyond the end of a row, as the weight is
      along[0] = fmaf(g[k], normal[k], along[0]);
      if (kCentered) along[kSums - 1] += g[k];
    }
    if (kAhead) ahead = fetch(row + groups, group.number < left - groups);
    add_up_group(along, room[round], group);
    if (!here) continue;
    const float slope = along[0] * inverse, shift = kCentered ? along[kSums - 1] * inverse : 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; k++) g[k] = now.rstd * (g[k] - fmaf(normal[k], slope, shift));
    if (kAdds && job.extra && job.extra_of_sum) add_extra();
    const Packed<kType> dx = pack<kType>(g);
    store<kType>((char*)job.dx + row * n * kSize, at, dx);
    if (!kAdds || !kAligned || !job.dbranch) continue;
    const uint32_t bits = kept(job.draw, row, group.thread);
    unpack<kType>(dx, g);
#pragma unroll
    for (int k = 0; k < kPer; k++) g[k] = bits >> k & 1u ? g[k] * job.draw.scale : 0.0f;
    store<kType>((char*)job.dbranch + row * n * kSize, at, pack<kType>(g));
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

// The threads for a row of n elements: whole warps.
int threads_of(int64_t n) { return (int)((n + kWarp * kPer - 1) / (kWarp * kPer)) * kWarp; }

int groups_of(int threads, int at_most) { return threads < at_most ? at_most / threads : 1; }

// How many blocks of so many threads run at a time, if `most` blocks of kShort threads do on a multiprocessor.
int64_t blocks_at_once(int threads, int most) {
  return processors() * (threads <= kShort ? most * kShort / threads : kMost / threads);
}

// Calls work(kBlock) with the largest block size of the kernel to run. kEver: whether there is one for short blocks.
template <bool kEver, class Work>
int with_blocks(int threads, const Work& work) {
  if (kEver && threads <= kShort) return work(std::integral_constant<int, kEver ? kShort : kMost>());
  return work(std::integral_constant<int, kMost>());
}

// The blocks of norm_backward: as many as run at a time, or fewer for few rows.
int64_t backward_blocks(const NormBackwardJob& job) {
  const int threads = threads_of(job.n), groups = groups_of(threads, kBackwardThreads);
  const int64_t wanted = (job.rows + groups - 1) / groups, most = blocks_at_once(threads * groups, kBackwardBlocks);
  return wanted < most ? wanted : most;
}

}  // namespace

// For unaligned rows, dropout is a launch of its own.
int cuda_norm(const NormJob& given, void* stream) {
  NormJob job = given;
  const bool aligned = on_16_bytes(job.n, {job.x, job.branch, job.weight, job.bias, job.sum, job.out});
  if (job.branch && !aligned) {
    const int error = cuda_dropout(job.draw, job.branch, job.x, job.sum, job.type, job.rows, job.n, stream);
    if (error) return error;
    job.x = job.sum, job.branch = nullptr;
  }
  const int threads = threads_of(job.n), groups = groups_of(threads, kForwardThreads);
  const int64_t of_block = groups * (job.branch || job.type == kFloat ? 1 : kMostAtOnce);
  const int64_t wanted = (job.rows + of_block - 1) / of_block, most = blocks_at_once(threads * groups, kForwardBlocks);
  return with_constants(job.type, aligned, [&](auto type, auto is_aligned) {
    constexpr int kType = type.value;
    constexpr bool kAligned = is_aligned.value;
    return with_blocks<kAligned>(threads * groups, [&](auto block) {
      constexpr int kBlock = block.value;
      const auto kernel = job.branch
                              ? job.bias ? norm<kType, true, true, true, kBlock> : norm<kType, false, true, true, kBlock>
                          : job.bias ? norm<kType, true, kAligned, false, kBlock>
                                     : norm<kType, false, kAligned, false, kBlock>;
      return launch(stream, wanted < most ? wanted : most, threads * groups, kernel, job, threads, 1.0f / (float)job.n);
    });
  });
}

int64_t cuda_norm_room(const NormBackwardJob& job) { return backward_blocks(job) * job.n * (job.centered ? 2 : 1); }

// For unaligned rows, dropout is a launch of its own. So is adding the extra gradient if there are not enough
// registers: for long fp32 rows, or unaligned ones.
int cuda_norm_backward(const NormBackwardJob& given, float* room, void* stream) {
  NormBackwardJob job = given;
  const bool aligned = on_16_bytes(job.n, {job.grad, job.extra, job.sum, job.weight, job.dx, job.dbranch});
  const int threads = threads_of(job.n), groups = groups_of(threads, kBackwardThreads);
  const bool fits = aligned && (job.type != kFloat || threads <= kShort);
  const bool drops = job.dbranch && !fits, adds = job.extra && !fits && job.type == kFloat;
  const auto dropout = [&](const Draw& draw, const void* x, const void* residual, void* out) {
    return cuda_dropout(draw, x, residual, out, job.type, job.rows, job.n, stream);
  };
  const Draw nothing{nullptr, 0, 0, 0, 0, 0, 0, 1.0f};
  int error = 0;
  if (adds && !job.extra_of_sum) {
    error = dropout(nothing, job.grad, job.extra, job.dx);
    job.grad = job.dx;  // a thread reads elements before it overwrites them
  }
  if (adds) job.extra = nullptr;
  if (drops) job.dbranch = nullptr;
  const int64_t blocks = backward_blocks(job), width = job.n * (job.centered ? 2 : 1);
  const bool more = job.extra || job.dbranch;
  if (!error) error = with_constants(job.type, aligned, [&](auto type, auto is_aligned) {
    constexpr int kType = type.value;
    constexpr bool kAligned = is_aligned.value;
    return with_blocks<kAligned>(threads * groups, [&](auto block) {
      constexpr int kBlock = block.value;
      constexpr bool kMore = kType != kFloat || kBlock == kShort;
      const auto kernel = more ? job.centered ? norm_backward<kType, true, kAligned, kMore, kBlock>
                                              : norm_backward<kType, false, kAligned, kMore, kBlock>
                          : job.centered ? norm_backward<kType, true, kAligned, false, kBlock>
                                         : norm_backward<kType, false, kAligned, false, kBlock>;
      return launch(stream, blocks, threads * groups, kernel, job, job.dweight ? room : nullptr, threads,
                    1.0f / (float)job.n);
    });
  });
  if (!error && adds && job.extra_of_sum) error = dropout(nothing, job.dx, given.extra, job.dx);
  if (!error && drops) error = dropout(job.draw, job.dx, nullptr, given.dbranch);
  if (error || !job.dweight) return error;
  return add_up(room, blocks, width, job.dweight, job.dbias, job.n, job.type, stream);
}

}  // namespace modelcenter
