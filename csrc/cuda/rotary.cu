// Rotary position embeddings: queries and keys are read and written once, by one launch. Computed in fp32 and rounded
// once; tested against float64, not bit for bit.
#include "rotary.h"

#include "row.h"

namespace modelcenter {
namespace {

constexpr int kThreads = 256;

// A unit is the part of a token that a thread rotates or copies. The thread continues with the same unit of other
// tokens.
struct Units {
  uint32_t of_head, turning;  // of a head, of which the first are rotated
  uint32_t of_token;          // of all heads of queries and keys
  uint32_t tokens_on;         // from a token of a thread to its next
};

// The place of a thread: its unit in a head, and the beginning of that head.
struct At {
  int64_t token;
  uint32_t unit;
  const char* x;
  char* out;
  int64_t x_on, out_on;  // bytes to the thread's next token

  __device__ __forceinline__ At(const Rotation& r, const Units& units, int size) {
    const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, first = thread / units.of_token;
    const uint32_t head = thread % units.of_token / units.of_head;
    const bool query = head < r.q.count;
    const int64_t number = query ? head : head - r.q.count, count = query ? r.q.count : r.k.count;
    const int64_t x_row = (query ? r.q.stride : r.k.stride) * size, out_row = count * r.head_dim * size;
    token = first < units.tokens_on ? first : r.tokens;
    unit = thread % units.of_token % units.of_head;
    x = (const char*)(query ? r.q.x : r.k.x) + first * x_row + number * r.head_dim * size;
    out = (char*)(query ? r.q.out : r.k.out) + first * out_row + number * r.head_dim * size;
    x_on = units.tokens_on * x_row, out_on = units.tokens_on * out_row;
  }
  __device__ __forceinline__ void next(const Units& units) {
    token += units.tokens_on;
    x += x_on, out += out_on;
  }
};

__device__ __forceinline__ float direction(const Rotation& r) { return r.back ? -1.0f : 1.0f; }

// Rotates (a, b) by the angle with this cosine and sine.
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

// If everything begins at multiples of 16 bytes, a unit is 8 pairs: two times 8 adjacent elements.
template <int kType, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) rotate_vectors(const Rotation r, const Units units) {
  constexpr int kSize = kType == kFloat ? 4 : 2;
  const Place<true> all(kPer, 0, 1);
  At at(r, units, kSize);
  if (at.unit >= units.turning) {
    const int64_t place = (2 * r.half + (at.unit - units.turning) * kPer) * kSize;
    for (; at.token < r.tokens; at.next(units)) store<kType>(at.out + place, all, load<kType>(at.x + place, all));
    return;
  }
  const int64_t first = (int64_t)at.unit * (kInterleaved ? 2 * kPer : kPer) * kSize;
  const int64_t second = first + (kInterleaved ? kPer : r.half) * kSize;
  for (; at.token < r.tokens; at.next(units)) {
    const int64_t angle = (at.token * r.half + at.unit * kPer) * kSize;
    const Packed<kType> packed_a = load<kType>(at.x + first, all), packed_b = load<kType>(at.x + second, all);
    float a[kPer], b[kPer], cos[kPer], sin[kPer];
    unpack<kType>(load<kType>((const char*)r.cos + angle, all), cos);
    unpack<kType>(load<kType>((const char*)r.sin + angle, all), sin);
    unpack<kType>(packed_a, a);
    unpack<kType>(packed_b, b);
#pragma unroll
    for (int k = 0; k < kPer; k++) {
      const float by = sin[k] * direction(r);
      if constexpr (kInterleaved) {
        float(&pairs)[kPer] = k < kPer / 2 ? a : b;
        turn(pairs[2 * k % kPer], pairs[2 * k % kPer + 1], cos[k], by);
      } else {
        turn(a[k], b[k], cos[k], by);
      }
    }
    store<kType>(at.out + first, all, pack<kType>(a));
    store<kType>(at.out + second, all, pack<kType>(b));
  }
}

// Otherwise a unit is a pair, or an element that is copied.
__global__ void __launch_bounds__(kThreads) rotate_numbers(const Rotation r, const Units units) {
  At at(r, units, r.type == kFloat ? 4 : 2);
  const bool turns = at.unit < units.turning;
  const int64_t first = !turns ? r.half + at.unit : r.interleaved ? 2 * (int64_t)at.unit : at.unit;
  const int64_t second = first + (r.interleaved ? 1 : r.half);
  for (; at.token < r.tokens; at.next(units)) {
    float a = number(at.x, r.type, first);
    if (turns) {
      const int64_t angle = at.token * r.half + at.unit;
      const float sin = number(r.sin, r.type, angle) * direction(r);
      float b = number(at.x, r.type, second);
      turn(a, b, number(r.cos, r.type, angle), sin);
      set_number(at.out, r.type, second, b);
    }
    set_number(at.out, r.type, first, a);
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
  const int64_t threads = blocks((of.tokens * of_token + kThreads - 1) / kThreads) * kThreads;
  if (!threads) return 0;
  const int64_t tokens_on = (threads + of_token - 1) / of_token;
  const int64_t grid = (tokens_on * of_token + kThreads - 1) / kThreads;
  const Units units{(uint32_t)of_head, (uint32_t)turning, (uint32_t)of_token, (uint32_t)tokens_on};
  if (!aligned) return launch(stream, grid, kThreads, rotate_numbers, of, units);
  return with_constants(of.type, of.interleaved, [&](auto type, auto interleaved) {
    return launch(stream, grid, kThreads, rotate_vectors<type.value, interleaved.value>, of, units);
  });
}

}  // namespace modelcenter
