// Random numbers that are a function of the place where they are used, and dropout by them; for CPU and CUDA.
//
// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") gives 128 random bits for a counter
// (token, site, group of channels) and a key. 16 of them decide an element. A block of 128 channels uses 16 counters:
// channel c of the block uses half (c / 16) % 2 of word c / 32 of counter c % 16, so that vectors need no shuffling.
#pragma once
#include "numbers.h"

namespace modelcenter {

constexpr int kDropoutBlock = 128;
constexpr int kDropoutLanes = 16;

// The draw of a call of dropout. Element (i, c) of a tensor is channel first_channel + c of token tokens[i], or of
// token first_token + i if tokens is null. It is dropped if its 16 bits are below `threshold`.
struct Draw {
  const int64_t* tokens;
  int64_t first_token, first_channel;
  uint32_t key_low, key_high, site, threshold;
  float scale;  // of kept elements
};

namespace {

MC_INLINE uint32_t high_half(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return (uint32_t)(((uint64_t)a * b) >> 32);
#endif
}

constexpr uint32_t kPhiloxA = 0xD2511F53u, kPhiloxB = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyA = 0x9E3779B9u, kPhiloxKeyB = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

// 128 random bits for the counter (group, site, token).
MC_INLINE void philox(uint32_t key_low, uint32_t key_high, uint32_t group, uint32_t site, uint64_t token,
                      uint32_t (&out)[4]) {
  uint32_t a = group, b = site, c = (uint32_t)token, d = (uint32_t)(token >> 32);
  for (int round = 0; round < kPhiloxRounds; round++) {
    const uint32_t high_a = high_half(kPhiloxA, a), low_a = kPhiloxA * a;
    const uint32_t high_c = high_half(kPhiloxB, c), low_c = kPhiloxB * c;
    a = high_c ^ b ^ key_low;
    c = high_a ^ d ^ key_high;
    b = low_c;
    d = low_a;
    key_low += kPhiloxKeyA;
    key_high += kPhiloxKeyB;
  }
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

// An element after dropout; word, half: its random bits.
MC_INLINE float dropped(float x, uint32_t word, int half, uint32_t threshold, float scale) {
  // Without a branch, which would be unpredictable.
  const uint32_t keep = 0u - (uint32_t)(((word >> (16 * half)) & 0xFFFFu) >= threshold);
  return float_of(bits_of(x * scale) & keep);
}

}  // namespace
}  // namespace modelcenter
