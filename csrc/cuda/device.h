// Shared by the kernels' files: launches, and numbers of each type in memory.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "../core/job.h"
#include "../core/numbers.h"

namespace modelcenter {
namespace {

// Multiprocessors of the current device.
inline int64_t processors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) == cudaSuccess)
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// The number of blocks of a launch over so many units; their work differs by at most one unit. Blocks are short,
// because at the end of a launch some run alone. But they have several units if that leaves enough blocks, because a
// block may first have to compute values that its units share.
inline int64_t blocks(int64_t units) {
  const int64_t all = processors(), shortest = (units + all * 128 - 1) / (all * 128);
  const int64_t enough = (units + all * 8 - 1) / (all * 8);
  const int64_t share = shortest > 4 ? shortest : enough < 4 ? enough : 4;
  return units ? (units + share - 1) / share : 0;
}

// Launches kernel(arguments...), unless there are no blocks. Returns 0 or a cudaError_t.
template <class... Parameters, class... Arguments>
int launch(void* stream, int64_t grid, int threads, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (grid == 0) return 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((unsigned)grid);
  config.blockDim = dim3((unsigned)threads);
  config.stream = (cudaStream_t)stream;
  return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The processor's own conversions take a tenth of the instructions of those in numbers.h, and differ from them only in
// the bits of NaNs.
__device__ __forceinline__ float of_fp16(uint16_t h) {
#ifdef __NVCC__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  return from_fp16(h);
#endif
}

__device__ __forceinline__ uint16_t as_fp16(float x) {
#ifdef __NVCC__
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  return to_fp16(x);
#endif
}

// Two 16-bit numbers in a word, with the bits of numbers.h.
template <int kType>
__device__ __forceinline__ uint32_t exact_pair(float low, float high) {
  const uint32_t a = kType == kBfloat16 ? to_bf16(low) : to_fp16(low);
  return a | (uint32_t)(kType == kBfloat16 ? to_bf16(high) : to_fp16(high)) << 16;
}

// The same by the processor's conversions.
template <int kType>
__device__ __forceinline__ uint32_t pair(float low, float high) {
#if !defined(__NVCC__)  // as the processor would give it
  const uint32_t both = exact_pair<kType>(low, high);
  return (low == low ? both & 0xFFFFu : 0x7FFFu) | (high == high ? both & 0xFFFF0000u : 0x7FFF0000u);
#elif __CUDA_ARCH__ >= 800
  uint32_t both;
  if (kType == kBfloat16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  if (kType == kHalf) return (uint32_t)as_fp16(low) | (uint32_t)as_fp16(high) << 16;
  return exact_pair<kType>(low, high);
#endif
}

// Conversions between words of memory and numbers, by the processor.
template <int kType>
constexpr int kOfWord = kType == kFloat ? 1 : 2;  // numbers

template <int kType, int kWords>
__device__ __forceinline__ void unpack(const uint32_t (&words)[kWords], float (&x)[kWords * kOfWord<kType>]) {
#pragma unroll
  for (int k = 0; k < kWords; k++) {
    if constexpr (kType == kFloat) x[k] = float_of(words[k]);
    else if constexpr (kType == kBfloat16)
      x[2 * k] = float_of(words[k] << 16), x[2 * k + 1] = float_of(words[k] & 0xFFFF0000u);
    else
      x[2 * k] = of_fp16((uint16_t)words[k]), x[2 * k + 1] = of_fp16((uint16_t)(words[k] >> 16));
  }
}

template <int kType, int kWords>
__device__ __forceinline__ void pack(const float (&x)[kWords * kOfWord<kType>], uint32_t (&words)[kWords]) {
#pragma unroll
  for (int k = 0; k < kWords; k++) {
    if constexpr (kType == kFloat) words[k] = bits_of(x[k]);
    else words[k] = pair<kType>(x[2 * k], x[2 * k + 1]);
  }
}

// The same for 16 bytes, which a thread moves at a time.
template <int kType>
constexpr int kOf16Bytes = 4 * kOfWord<kType>;  // numbers

__device__ __forceinline__ void words_of(const uint4& all, uint32_t* words) {
  words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
}

__device__ __forceinline__ uint4 of_words(const uint32_t* words) {
  uint4 all;
  all.x = words[0], all.y = words[1], all.z = words[2], all.w = words[3];
  return all;
}

template <int kType>
__device__ __forceinline__ void unpack_16_bytes(const uint4& all, float (&x)[kOf16Bytes<kType>]) {
  uint32_t words[4];
  words_of(all, words);
  unpack<kType>(words, x);
}

template <int kType>
__device__ __forceinline__ uint4 pack_16_bytes(const float (&x)[kOf16Bytes<kType>]) {
  uint32_t words[4];
  pack<kType>(x, words);
  return of_words(words);
}

// One number, of a type known only at run time, with the bits of numbers.h.
__device__ __forceinline__ float number(const void* base, int type, int64_t i) {
  if (type == kFloat) return ((const float*)base)[i];
  const uint16_t h = ((const uint16_t*)base)[i];
  return type == kBfloat16 ? from_bf16(h) : from_fp16(h);
}

__device__ __forceinline__ void set_number(void* base, int type, int64_t i, float x) {
  if (type == kFloat) ((float*)base)[i] = x;
  else ((uint16_t*)base)[i] = type == kBfloat16 ? to_bf16(x) : to_fp16(x);
}

}  // namespace
}  // namespace modelcenter
