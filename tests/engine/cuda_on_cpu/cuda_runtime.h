// What csrc/cuda/*.cu need of CUDA, on a CPU: for a C++ compiler in place of nvcc, to run its logic without a GPU.
//
// A launch runs its blocks one after the other, in an order drawn at random, and the threads of a block as fibres. One
// runs until it waits for others; who is next goes by priorities drawn for each block, so that some threads are far
// ahead of others and a barrier that is missing shows. Shared memory begins as NaNs. A launch that CUDA would refuse is
// refused; threads that wait for each other in vain end the process with a message.
//
// CUDA_ON_CPU_PROCESSORS says how many multiprocessors there are, CUDA_ON_CPU_SEED draws the orders.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("cuda_shared")))

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) ushort4 { uint16_t x, y, z, w; };
struct alignas(4) uchar4 { uint8_t x, y, z, w; };
template <class T>
inline void __stcg(T* p, T x) {
  *p = x;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // the same in all files of the library

namespace cuda_on_cpu {

inline int number(const char* name, int otherwise) {
  const char* set = getenv(name);
  return set ? atoi(set) : otherwise;
}

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "cuda_on_cpu: thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, what);
  abort();
}

inline int guards = 0;  // that are alive: whether the tensors' device is the current one

constexpr unsigned kWarp = 32;
enum State { kReady, kAtBarrier, kAtWarp, kDone };

// The threads of the block that runs.
class Block {
 public:
  static Block& now() {
    static Block block;
    return block;
  }

  void run(unsigned threads, const std::function<void()>& body) {
    body_ = &body;
    count_ = threads;
    state_.assign(threads, kReady);
    order_.resize(threads);
    std::iota(order_.begin(), order_.end(), 0u);
    std::shuffle(order_.begin(), order_.end(), random);
    memset(__start_cuda_shared, 0xFF, (size_t)(__stop_cuda_shared - __start_cuda_shared));
    for (unsigned from = 0;;) {  // all before it wait
      while (from < count_ && state_[order_[from]] != kReady) from++;
      if (from == count_) {
        if (all(0, count_, kDone)) return;
        if (!all(0, count_, kAtBarrier)) fail("it, or another of its block, waits for threads that will not come");
        std::fill(state_.begin(), state_.end(), kReady);
        from = 0;
        continue;
      }
      running_ = order_[from];
      threadIdx = dim3(running_);
      go_on(running_);
      const unsigned warp = running_ / kWarp * kWarp, end = std::min(warp + kWarp, count_);
      if (state_[running_] == kAtWarp && all(warp, end, kAtWarp)) {
        std::fill(state_.begin() + warp, state_.begin() + end, kReady);
        from = 0;
      }
    }
  }

  void wait(State state) {
    state_[running_] = state;
    if (!_setjmp(stopped_[running_])) _longjmp(scheduler_, 1);
  }

  uint32_t exchange(uint32_t mask, uint32_t x, unsigned other) {
    if (mask != 0xFFFFFFFFu || count_ % kWarp) fail("only whole warps exchange numbers here");
    const unsigned self = running_;
    passed_[self] = x;
    wait(kAtWarp);
    const uint32_t found = passed_[self / kWarp * kWarp + other % kWarp];
    wait(kAtWarp);
    return found;
  }

  uint32_t vote(uint32_t mask, bool yes) {
    if (mask != 0xFFFFFFFFu || count_ % kWarp) fail("only whole warps vote here");
    const unsigned self = running_;
    passed_[self] = yes;
    wait(kAtWarp);
    uint32_t found = 0;
    for (unsigned lane = 0; lane < kWarp; lane++) found |= passed_[self / kWarp * kWarp + lane] << lane;
    wait(kAtWarp);
    return found;
  }

  std::mt19937 random{(unsigned)number("CUDA_ON_CPU_SEED", 0)};

 private:
  static constexpr size_t kStack = 256 * 1024;

  // Begins a thread, or lets it go on from where it stopped. Only a first time takes a call of the system, as a context
  // holds the mask of signals, too: a thread outlives its block.
  void go_on(unsigned thread) {
    if (_setjmp(scheduler_)) return;
    if (begun_[thread]) _longjmp(stopped_[thread], 1);
    begun_[thread] = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = malloc(kStack);
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, &Block::begin, 0);
    setcontext(&context);
  }

  static void begin() {
    for (;;) {
      (*now().body_)();
      now().wait(kDone);
    }
  }

  bool all(unsigned from, unsigned to, State state) const {
    return std::all_of(state_.begin() + from, state_.begin() + to, [&](State s) { return s == state; });
  }

  const std::function<void()>* body_ = nullptr;
  unsigned count_ = 0, running_ = 0;
  std::vector<State> state_;
  std::vector<unsigned> order_;
  static constexpr unsigned kMost = 1024;  // threads of a block
  bool begun_[kMost] = {};
  jmp_buf stopped_[kMost], scheduler_;
  uint32_t passed_[kMost];
};

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::Block::now().wait(cuda_on_cpu::kAtBarrier); }
inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t x, int lanes) {
  return cuda_on_cpu::Block::now().exchange(mask, x, (threadIdx.x % cuda_on_cpu::kWarp) ^ (unsigned)lanes);
}
inline uint32_t __ballot_sync(uint32_t mask, bool yes) { return cuda_on_cpu::Block::now().vote(mask, yes); }
inline float __shfl_xor_sync(uint32_t mask, float x, int lanes) {
  uint32_t u;
  memcpy(&u, &x, 4);
  u = __shfl_xor_sync(mask, u, lanes);
  memcpy(&x, &u, 4);
  return x;
}
inline float __expf(float x) { return __builtin_expf(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)(((uint64_t)a * b) >> 32); }
inline uint32_t __float_as_uint(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float __uint_as_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

inline cudaError_t cudaGetDevice(int* device) {
  if (!cuda_on_cpu::guards) cuda_on_cpu::fail("the current device is asked for, and may be another than the tensors'");
  return *device = 0, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = cuda_on_cpu::number("CUDA_ON_CPU_PROCESSORS", 2), cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const unsigned grid = config->gridDim.x, threads = config->blockDim.x;
  if (!grid || !threads || threads > 1024 || (sizeof(Parameters) + ... + 0) > 32764) return cudaErrorInvalidConfiguration;
  std::tuple<Parameters...> taken(arguments...);
  const std::function<void()> body = [&] { std::apply(kernel, taken); };
  std::vector<unsigned> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  auto& block = cuda_on_cpu::Block::now();
  std::shuffle(order.begin(), order.end(), block.random);
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // nvcc's -ftz=true
  for (unsigned b : order) {
    blockIdx = dim3(b);
    block.run(threads, body);
  }
  _mm_setcsr(before);
  return cudaSuccess;
}
