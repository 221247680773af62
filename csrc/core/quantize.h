// 8-bit moments: blocks of 128 numbers of a row share an fp32 scale, and each number is an 8-bit float times the scale.
// The largest of a block has the largest code, so its magnitude is exact; the others keep 4 significant bits over 15
// (first moment: sign, 4 bits of exponent, 3 of fraction) or 31 (second moment: 5 and 3) powers of two below it.
//
// The second moment changes by a thousandth per step, far less than the distance of its codes: it is rounded
// stochastically, exact in expectation, by a hash of (parameter, step, place in the whole tensor). It is never rounded
// to zero, because steps are divided by its root.
#pragma once
#include "numbers.h"

namespace modelcenter {

constexpr int kQuantBlock = 128;

namespace {

constexpr float kTop = 1.875f;  // the value of the largest code
constexpr uint32_t kFirstBase = (127u - 15u) << 3, kSecondBase = (127u - 31u) << 3;

// The scale of a block, from the bits of its largest magnitude (NaNs are larger than all numbers).
MC_INLINE float scale_of(uint32_t largest) { return float_of(largest) / kTop; }

// The divisor of a block's numbers: 1 if all of them are zero.
MC_INLINE float divisor_of(float scale) { return scale == 0.0f ? 1.0f : scale; }

MC_INLINE float from_first(uint8_t code, float scale) {
  const uint32_t c = code & 127u;
  const float magnitude = float_of(c ? (c + kFirstBase) << 20 : 0u) * scale;
  return float_of(bits_of(magnitude) | ((uint32_t)(code & 128u) << 24));
}

MC_INLINE uint8_t to_first(float x, float divisor) {
  const uint32_t all = bits_of(x / divisor), u = all & 0x7FFFFFFFu;
  const uint32_t rounded = (u + 0x7FFFFu + ((u >> 20) & 1u)) >> 20;
  const uint32_t above = rounded > kFirstBase ? rounded - kFirstBase : 0u;
  return (uint8_t)((above < 127u ? above : 127u) | (all >> 24 & 128u));
}

MC_INLINE float from_second(uint8_t code, float scale) {
  return float_of(code ? ((uint32_t)code + kSecondBase) << 20 : 0u) * scale;
}

MC_INLINE uint8_t to_second(float x, float divisor, uint32_t random) {
  const uint32_t rounded = (bits_of(x / divisor) + (random & 0xFFFFFu)) >> 20;
  const uint32_t above = rounded > kSecondBase ? rounded - kSecondBase : 1u;
  return (uint8_t)(x == 0.0f ? 0u : (above < 255u ? above : 255u));
}

}  // namespace
}  // namespace modelcenter
