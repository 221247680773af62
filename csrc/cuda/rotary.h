// The entry of rotary position embeddings, without torch: 0 or a cudaError_t. Nothing here waits for the device.
#pragma once
#include <stdint.h>

#include "../core/job.h"

namespace modelcenter {

// The heads of all tokens: of x they are `stride` numbers apart from token to token, of out they follow one another.
struct Heads {
  const void* x;
  void* out;
  int64_t stride, count;
};

// Of each head the first 2 * half channels are turned, in pairs of i and i + half, or interleaved of 2 i and 2 i + 1;
// the others are copied. back: the other way.
struct Rotation {
  Heads q, k;
  const void *cos, *sin;  // (tokens, half)
  int type;
  int64_t tokens, head_dim, half;
  bool interleaved, back;
};

int cuda_rotate(const Rotation& of, void* stream);

}  // namespace modelcenter
