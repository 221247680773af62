// The job of a kernel of rotary position embeddings.
#pragma once
#include <stdint.h>

namespace modelcenter {

// The heads of all tokens. In x, tokens are `stride` elements apart; in out they are adjacent.
struct Heads {
  const void* x;
  void* out;
  int64_t stride, count;
};

// The first 2 * half channels of each head are rotated, in pairs i and i + half, or interleaved 2 i and 2 i + 1; the
// others are copied. back: rotate in the opposite direction.
struct Rotation {
  Heads q, k;
  const void *cos, *sin;  // (tokens, half)
  int type;
  int64_t tokens, head_dim, half;
  bool interleaved, back;
};

}  // namespace modelcenter
