"""Split a list of inputs into one part per process, for inference over prompts or files."""

from __future__ import annotations

from typing import Any


def share_of(inputs: Any, num_processes: int, process_index: int, apply_padding: bool = False) -> Any:
    """Return one process's part: contiguous, the first processes get one element more if it does not divide.

    `apply_padding` pads shorter parts with the last of all elements. A string is one input, not a sequence of letters:
    every process gets all of it.
    """
    if num_processes == 1 or isinstance(inputs, (str, bytes)):
        return inputs
    if isinstance(inputs, dict):
        lengths = {name: len(values) for name, values in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes() needs values of one length in a dict, and got {lengths}.")
        return {name: share_of(values, num_processes, process_index, apply_padding) for name, values in inputs.items()}
    whole, rest = divmod(len(inputs), num_processes)
    start = process_index * whole + min(process_index, rest)
    stop = start + whole + (process_index < rest)
    missing = whole + (rest > 0) - (stop - start) if apply_padding else 0
    indices = [*range(start, stop), *([len(inputs) - 1] * missing)]
    if hasattr(inputs, "__array__"):  # a tensor, on any device, or an array
        return inputs[indices] if missing else inputs[start:stop]
    if hasattr(inputs, "select"):  # a Hugging Face data set
        return inputs.select(indices)
    part = inputs[start:stop]
    if missing == 0:
        return part
    padded = [inputs[index] for index in indices]
    return tuple(padded) if isinstance(part, tuple) else padded
