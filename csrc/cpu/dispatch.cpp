// Chooses among the instruction sets at run time, and sets the floating-point unit.
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace modelcenter {

static const CpuKernels& choose() {
#if defined(__x86_64__)
  const char* limit = getenv("MODELCENTER_ISA");
  const bool plain = limit && !strcmp(limit, "plain"), avx2 = limit && !strcmp(limit, "avx2");
  __builtin_cpu_init();
  const bool wide = !plain && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("pclmul");
  if (wide && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return kernels_avx512();
  if (wide && __builtin_cpu_supports("avx2")) return kernels_avx2();
#endif
  return kernels_plain();
}

static bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

const bool kAmd = is_amd();

const CpuKernels& kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

#if defined(__x86_64__)
FlushDenormals::FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr((unsigned)before_ | 0x8040); }
FlushDenormals::~FlushDenormals() { _mm_setcsr((unsigned)before_); }
#elif defined(__aarch64__)
FlushDenormals::FlushDenormals() {
  asm volatile("mrs %0, fpcr" : "=r"(before_));
  asm volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
}
FlushDenormals::~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#else
FlushDenormals::FlushDenormals() : before_(0) {}
FlushDenormals::~FlushDenormals() {}
#endif

}  // namespace modelcenter
