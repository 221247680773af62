// 16-bit numbers as integers, rounded as by hardware: to nearest, ties to even.
#pragma once
#include <stdint.h>
#include <string.h>

#include "formulas.h"

namespace modelcenter {
namespace {

MC_INLINE uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
#endif
}

MC_INLINE float float_of(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  float x;
  memcpy(&x, &u, 4);
  return x;
#endif
}

MC_INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

MC_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// After Giesen's public-domain conversions: denormals are made by one exact addition.
MC_INLINE float from_fp16(uint16_t h) {
  const uint32_t shifted = (uint32_t)(h & 0x7FFFu) << 13;
  const uint32_t exponent = shifted & 0x0F800000u;
  uint32_t u = shifted + (112u << 23);
  u += exponent == 0x0F800000u ? (112u << 23) : 0u;
  const float small = float_of(u + (1u << 23)) - float_of(113u << 23);
  u = exponent == 0u ? bits_of(small) : u;
  return float_of(u | ((uint32_t)(h & 0x8000u) << 16));
}

MC_INLINE uint16_t to_fp16(float x) {
  const uint32_t all = bits_of(x), sign = all & 0x80000000u, u = all ^ sign;
  const uint32_t small = bits_of(float_of(u) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (u - (112u << 23) + 0xFFFu + ((u >> 13) & 1u)) >> 13;
  uint32_t h = u < (113u << 23) ? small : normal;
  h = u >= (143u << 23) ? (u > 0x7F800000u ? 0x7E00u : 0x7C00u) : h;
  return (uint16_t)(h | (sign >> 16));
}

// An fp32 number as bf16 and 16 further bits: exact, also for infinities; a NaN becomes the standard one. The bf16 part
// is the number rounded to nearest, ties away from zero, so that it can be used by itself.
MC_INLINE float merge(uint16_t high, int16_t low) { return float_of(((uint32_t)high << 16) + (uint32_t)(int32_t)low); }

MC_INLINE void split(float x, uint16_t& high, int16_t& low) {
  uint32_t u = bits_of(x);
  u = (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : u;
  low = (int16_t)(uint16_t)(u & 0xFFFFu);
  high = (uint16_t)((u + 0x8000u) >> 16);
}

// 32 random bits for a place in a tensor. salt: a hash of (parameter, step).
MC_INLINE uint32_t random_of(uint32_t salt, uint32_t place_low, uint32_t place_high) {
  return mix(mix(place_low ^ salt) ^ place_high);
}

// Stochastic rounding: up with the probability that makes the expectation exact.
MC_INLINE uint16_t to_bf16_at_random(float x, uint32_t salt, uint32_t place_low, uint32_t place_high) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + (random_of(salt, place_low, place_high) & 0xFFFFu)) >> 16;  // an infinity stays one
  return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

}  // namespace
}  // namespace modelcenter
