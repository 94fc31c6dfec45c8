// Tensors of the device: how they are made, and how the host's kernels reach their memory.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

namespace simulated {

void refuse_float64(bool refused);

// Let a parameter stay the same object when its model moves to the device, as on CUDA.
void move_in_place(bool in_place);

// Let the host run ahead of kernels where the shapes of results are known; else kernels run when they are called, and
// only their results are late.
void run_kernels_ahead(bool ahead);

bool is_on_device(const at::Tensor& tensor);
at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device);

// A tensor of the host over the same memory, which it does not own: work of a stream must not keep memory alive.
at::Tensor host_view(const at::Tensor& tensor);

// A tensor of the same sizes and strides with memory of its own on the host.
at::Tensor hidden_copy(const at::Tensor& view, bool with_content);

void poison(const at::Tensor& view);
void write(const at::Tensor& view, const at::Tensor& values);

} // namespace simulated
