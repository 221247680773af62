// The jobs of kernels, without torch; the same for CPU and CUDA.
#pragma once
#include <stdint.h>

#include "formulas.h"

namespace modelcenter {

// Elements that a thread (or a block of a GPU) processes at a time; norms are summed in units of this size.
constexpr int64_t kChunk = 16384;

enum Type : int { kFloat = 0, kBfloat16 = 1, kHalf = 2, kByte = 3 };

// Where the fp32 value of a parameter is kept: in the parameter; in aux; in the parameter and 16 bits in aux; nowhere
// (stochastic rounding).
enum Mode : int { kPlain = 0, kMaster = 1, kRemainder = 2, kRandom = 3 };

enum Rule : int { kAdamW = 0, kLion = 1, kMomentum = 2, kAdamW8 = 3 };

// The place of element i of a shard in the whole tensor: base + (i / inner) * stride + i % inner. key: the tensor's.
struct Place {
  int64_t key, inner, stride, base;
};

namespace {
MC_INLINE uint64_t place_of(const Place& p, int64_t i) {
  return (uint64_t)(p.base + i / p.inner * p.stride + i % p.inner);
}
}  // namespace

// The memory of a tensor of n elements and its gradient and states.
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
  // For 8-bit moments: the scales of their blocks, and the length of a row; blocks do not cross its end.
  float* m_scale;
  float* v_scale;
  int64_t width;
};

struct Types {
  int p, g, m;
  int mode;
  bool stream;  // on a CPU: stores to write-only memory bypass the caches
};

inline int size_of(int type) { return type == kFloat ? 4 : type == kByte ? 1 : 2; }

}  // namespace modelcenter
