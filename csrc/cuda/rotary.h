// The entry of rotary position embeddings, without torch: 0 or a cudaError_t. Nothing here waits for the device.
#pragma once
#include "../core/rotary.h"

namespace modelcenter {

int cuda_rotate(const Rotation& of, void* stream);

}  // namespace modelcenter
