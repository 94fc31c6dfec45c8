// Collectives of the device: gloo's on host copies, in the order of streams.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

// Return a backend of the device's type whose ranks talk to each other through another backend, of the host's.
c10::intrusive_ptr<c10d::Backend> collectives_over(const c10::intrusive_ptr<c10d::Backend>& host);

// Let a collective that loses a peer never complete, instead of failing.
void set_failures_are_silent(bool silent);
bool failures_are_silent();

// End all collectives of this process that have not completed: they have no result.
void interrupt_collectives();

} // namespace simulated
