"""Cut a list of inputs into one part per process, for inference over prompts or files."""

from __future__ import annotations

from typing import Any

import torch


def share_of(inputs: Any, num_processes: int, process_index: int, apply_padding: bool = False) -> Any:
    """Return one process's part: contiguous, the first processes one element longer where it does not divide."""
    if num_processes == 1:
        return inputs
    if isinstance(inputs, dict):
        lengths = {name: len(values) for name, values in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes() needs values of one length in a dict, and got {lengths}.")
        return {name: share_of(values, num_processes, process_index, apply_padding) for name, values in inputs.items()}
    whole, rest = divmod(len(inputs), num_processes)
    start = process_index * whole + min(process_index, rest)
    stop = start + whole + (process_index < rest)
    longest = whole + (rest > 0)
    missing = longest - (stop - start) if apply_padding and len(inputs) else 0
    indices = [*range(start, stop), *([max(stop - 1, 0)] * missing)]
    if hasattr(inputs, "select"):  # a Hugging Face data set
        return inputs.select(indices)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(indices, dtype=torch.long, device=inputs.device)] if missing else inputs[start:stop]
    part = inputs[start:stop]
    return part if missing == 0 else part + type(inputs)(inputs[index] for index in indices[len(part) :])
