"""The published module `accelerate.test_utils`."""

from meshwright.published import publish as _publish
from meshwright.testing.machine import device_count as device_count

from .testing import (
    are_the_same_tensors as are_the_same_tensors,
    torch_device as torch_device,
)
from .training import (
    RegressionDataset as RegressionDataset,
    RegressionModel as RegressionModel,
)

_publish(__name__)
