// Rotary position embeddings: queries and keys are read and written once, by one launch. Computed in fp32 and rounded
// once; tested against float64, not bit for bit.
#include "rotary.h"

#include "row.h"

namespace modelcenter {
namespace {

constexpr int kThreads = 256;

// Threads take the units of all tokens one by one. A unit is what a thread turns, or copies, at a time.
struct Walk {
  uint32_t of_head, turning;      // units of a head, the first of which turn
  uint32_t of_token;              // of all heads of queries and keys
  uint32_t tokens_on, units_on;   // from one unit of a thread to its next
};

// Where the numbers of a unit's head are.
struct At {
  const char* x;
  char* out;
};

struct Step {
  int64_t token;
  uint32_t unit;  // of the token

  __device__ __forceinline__ explicit Step(const Walk& walk) {
    const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
    token = thread / walk.of_token;
    unit = thread % walk.of_token;
  }
  __device__ __forceinline__ void next(const Walk& walk) {
    token += walk.tokens_on;
    unit += walk.units_on;
    if (unit >= walk.of_token) unit -= walk.of_token, token++;
  }
  __device__ __forceinline__ At find(const Rotation& r, uint32_t head, int size) const {
    const bool query = head < r.q.count;
    const int64_t count = query ? r.q.count : r.k.count, stride = query ? r.q.stride : r.k.stride;
    const int64_t number = query ? head : head - r.q.count;
    const char* const x = (const char*)(query ? r.q.x : r.k.x);
    char* const out = (char*)(query ? r.q.out : r.k.out);
    return {x + (token * stride + number * r.head_dim) * size, out + (token * count + number) * r.head_dim * size};
  }
};

// (a, b) by the angle whose cosine and sine these are.
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

// Where all that is read and written begins at multiples of 16 bytes, a unit is 8 pairs: two times 8 neighbours.
template <int kType, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) rotate_vectors(const Rotation r, const Walk walk) {
  constexpr int kSize = kType == kFloat ? 4 : 2;
  const Place<true> all(kPer, 0, 1);
  for (Step at(walk); at.token < r.tokens; at.next(walk)) {
    const uint32_t head = at.unit / walk.of_head, unit = at.unit % walk.of_head;
    const At here = at.find(r, head, kSize);
    if (unit >= walk.turning) {
      const int64_t place = (2 * r.half + (unit - walk.turning) * kPer) * kSize;
      store<kType>(here.out + place, all, load<kType>(here.x + place, all));
      continue;
    }
    const int64_t first = (int64_t)unit * (kInterleaved ? 2 * kPer : kPer) * kSize;
    const int64_t second = first + (kInterleaved ? kPer : r.half) * kSize;
    const int64_t angle = (at.token * r.half + unit * kPer) * kSize;
    const Packed<kType> packed_a = load<kType>(here.x + first, all), packed_b = load<kType>(here.x + second, all);
    float a[kPer], b[kPer], cos[kPer], sin[kPer];
    unpack<kType>(load<kType>((const char*)r.cos + angle, all), cos);
    unpack<kType>(load<kType>((const char*)r.sin + angle, all), sin);
    unpack<kType>(packed_a, a);
    unpack<kType>(packed_b, b);
#pragma unroll
    for (int k = 0; k < kPer; k++) {
      const float by = r.back ? -sin[k] : sin[k];
      if constexpr (kInterleaved) {
        float(&pairs)[kPer] = k < kPer / 2 ? a : b;
        turn(pairs[2 * k % kPer], pairs[2 * k % kPer + 1], cos[k], by);
      } else {
        turn(a[k], b[k], cos[k], by);
      }
    }
    store<kType>(here.out + first, all, pack<kType>(a));
    store<kType>(here.out + second, all, pack<kType>(b));
  }
}

// Else a unit is a pair, or a number that is copied.
__global__ void __launch_bounds__(kThreads) rotate_numbers(const Rotation r, const Walk walk) {
  const int size = r.type == kFloat ? 4 : 2;
  for (Step at(walk); at.token < r.tokens; at.next(walk)) {
    const uint32_t head = at.unit / walk.of_head, unit = at.unit % walk.of_head;
    const At here = at.find(r, head, size);
    if (unit >= walk.turning) {
      const int64_t place = r.half + unit;
      set_number(here.out, r.type, place, number(here.x, r.type, place));
      continue;
    }
    const int64_t first = r.interleaved ? 2 * (int64_t)unit : unit, second = first + (r.interleaved ? 1 : r.half);
    const int64_t angle = at.token * r.half + unit;
    const float sin = number(r.sin, r.type, angle);
    float a = number(here.x, r.type, first), b = number(here.x, r.type, second);
    turn(a, b, number(r.cos, r.type, angle), r.back ? -sin : sin);
    set_number(here.out, r.type, first, a);
    set_number(here.out, r.type, second, b);
  }
}

bool is_aligned(const Heads& of, int64_t head_dim, int size) {
  return !of.count || (on_16_bytes(head_dim, {of.x, of.out}) && of.stride * size % 16 == 0);
}

}  // namespace

int cuda_rotate(const Rotation& of, void* stream) {
  const int size = size_of(of.type);
  const bool aligned = on_16_bytes(of.half, {of.cos, of.sin}) && is_aligned(of.q, of.head_dim, size) &&
                       is_aligned(of.k, of.head_dim, size);
  const int64_t per = aligned ? kPer : 1, turning = of.half / per;
  const int64_t of_head = turning + (of.head_dim - 2 * of.half) / per, of_token = of_head * (of.q.count + of.k.count);
  const int64_t grid = blocks((of.tokens * of_token + kThreads - 1) / kThreads);
  if (!grid) return 0;
  const Walk walk{(uint32_t)of_head, (uint32_t)turning, (uint32_t)of_token,
                  (uint32_t)(grid * kThreads / of_token), (uint32_t)(grid * kThreads % of_token)};
  if (!aligned) return launch(stream, grid, kThreads, rotate_numbers, of, walk);
  return with_constants(of.type, of.interleaved, [&](auto type, auto interleaved) {
    return launch(stream, grid, kThreads, rotate_vectors<type.value, interleaved.value>, of, walk);
  });
}

}  // namespace modelcenter
