// What torch asks of a device type: the current device and stream, events, hooks, generators.
#pragma once

#include "streams.h"

#include <ATen/core/Generator.h>

namespace simulated {

void register_hooks();

const at::Generator& default_generator(int device);

// Return the CPU's generator behind a device's: it draws the numbers, so that a seed gives the same ones as on the CPU.
at::Generator host_generator(const at::Generator& generator);

} // namespace simulated
