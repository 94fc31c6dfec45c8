"""Published path of what tests and examples of other projects use."""

from .machine import are_the_same_tensors, device_count, torch_device
from .training import RegressionDataset, RegressionModel

__all__ = ["RegressionDataset", "RegressionModel", "are_the_same_tensors", "device_count", "torch_device"]
