// The entry point of rotary position embeddings, without torch: returns 0 or a cudaError_t, and does not wait for the
// device.
#pragma once
#include "../core/rotary.h"

namespace modelcenter {

int cuda_rotate(const Rotation& of, void* stream);

}  // namespace modelcenter
