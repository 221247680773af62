// What the sections of kernels_driver.cpp share: numbers that a hash makes, threads, scratch memory, and how results are shown.
#pragma once
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "core/numbers.h"
#include "core/quantize.h"
#include "cpu/kernels.h"

using namespace modelcenter;
using Bytes = std::vector<unsigned char>;

static const char* const kTypes[] = {"f32", "bf16", "f16", "u8"};
static const CpuKernels& k = kernels();
static uint32_t seed = 1;

static void show(const std::string& name, const char* type, const void* data, size_t count, size_t size) {
  printf("%s %s %zu\n", name.c_str(), type, count);
  if (count) fwrite(data, size, count, stdout);
}

static void show(const std::string& name, const Bytes& x, int type) {
  show(name, kTypes[type], x.data(), x.size() / (size_t)size_of(type), (size_t)size_of(type));
}

static void show(const std::string& name, const std::vector<float>& x) { show(name, "f32", x.data(), x.size(), 4); }

// Numbers of many magnitudes, from 2^-16 up; every 16th is one that kernels may trip over.
static float number(bool odd) {
  static const uint32_t kOdd[] = {0u, 0x80000000u, 1u, 0x80000001u, 0x007FFFFFu, 0x00800000u, 0x7F7FFFFFu, 0x7F800000u,
                                  0xFF800000u, 0x7FC00000u, 0x33000001u, 0x38800000u, 0x387FE000u, 0x477FE000u};
  const uint32_t bits = mix(seed++), which = mix(seed++);
  if (odd && which % 16 == 0) return float_of(kOdd[which / 16 % 14]);
  return float_of((bits & 0x807FFFFFu) | ((111u + which % 18) << 23));
}

static std::vector<float> floats(int64_t n, bool odd = false, bool positive = false) {
  std::vector<float> x((size_t)n);
  for (float& value : x) value = positive ? fabsf(number(odd)) : number(odd);
  return x;
}

static Bytes numbers(int64_t n, int type, bool odd = false, bool positive = false) {
  const std::vector<float> x = floats(n, odd, positive);
  Bytes out((size_t)(n * size_of(type)));
  k.cast(out.data(), type, x.data(), kFloat, 1.0f, n);
  return out;
}

static Bytes codes(int64_t n) {
  Bytes out((size_t)n);
  for (unsigned char& value : out) value = (unsigned char)mix(seed++);
  return out;
}

// Memory that a kernel must have written before it reads it: NaNs, no more of them than asked for.
static std::vector<float> unwritten(int64_t n) { return std::vector<float>((size_t)n, __builtin_nanf("")); }

// The same at the start of a cache line, as the bindings give it.
class Scratch {
 public:
  explicit Scratch(int64_t n) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, sizeof(float) * (size_t)n)) abort();
    at = (float*)memory;
    std::fill(at, at + n, __builtin_nanf(""));
  }
  ~Scratch() { free(at); }
  Scratch(const Scratch&) = delete;
  float* at;
};

// Runs body(unit) for each unit, on three threads at most.
template <class Body>
static void on_threads(int64_t units, const Body& body) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3 && t < units; t++)
    threads.emplace_back([&body, units, t] {
      FlushDenormals flush;
      for (int64_t unit = t; unit < units; unit += 3) body(unit);
    });
  for (std::thread& thread : threads) thread.join();
}
