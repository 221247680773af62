// What a kernel of rotary position embeddings is asked to do.
#pragma once
#include <stdint.h>

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

}  // namespace modelcenter
