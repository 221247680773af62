// What a kernel is asked to do, without torch: the same for CPU and CUDA.
#pragma once
#include <stdint.h>

#include "formulas.h"

namespace modelcenter {

// Elements that a thread (or a block of a GPU) takes at a time; also the unit of the order in which norms are summed.
constexpr int64_t kChunk = 16384;

enum Type : int { kFloat = 0, kBfloat16 = 1, kHalf = 2, kByte = 3 };

// Where the fp32 value of a parameter is: it is the parameter; in aux; in the parameter and 16 bits in aux; nowhere
// (rounding at random).
enum Mode : int { kPlain = 0, kMaster = 1, kRemainder = 2, kRandom = 3 };

enum Rule : int { kAdamW = 0, kLion = 1, kMomentum = 2, kAdamW8 = 3 };

// Where element i of a shard is in the whole tensor: base + (i / inner) * stride + i % inner. `key` is the tensor's.
struct Place {
  int64_t key, inner, stride, base;
};

namespace {
MC_INLINE uint64_t place_of(const Place& p, int64_t i) {
  return (uint64_t)(p.base + i / p.inner * p.stride + i % p.inner);
}
}  // namespace

// Where a tensor of n elements and what belongs to it are.
struct Memory {
  void* p;
  const void* g;
  void* m;
  void* v;
  void* aux;
  float* step;
  int64_t n;
};

struct Slab : Memory {
  Place place;
  // Of moments in 8 bits: the scales of their blocks, and the length of a row, across whose end no block goes.
  float* m_scale;
  float* v_scale;
  int64_t width;
};

struct Types {
  int p, g, m;
  int mode;
  bool stream;  // on a CPU: what is only written goes past the caches
};

inline int size_of(int type) { return type == kFloat ? 4 : type == kByte ? 1 : 2; }

}  // namespace modelcenter
