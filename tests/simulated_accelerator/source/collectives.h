// Collectives of the device: gloo's on host copies, in the order of streams.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace simulated {

// Let Python make a backend of the device's type whose ranks talk to each other through another backend, of the host's.
void bind_collectives(pybind11::module_& module);

// Let a collective that loses a peer never complete, instead of failing.
void set_failures_are_silent(bool silent);
bool failures_are_silent();

// End all collectives of this process that have not completed: they have no result.
void interrupt_collectives();

} // namespace simulated
