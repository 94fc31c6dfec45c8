"""The published module `accelerate.test_utils.training`."""

from meshwright.published import publish as _publish
from meshwright.testing.training import (
    RegressionDataset as RegressionDataset,
    RegressionModel as RegressionModel,
    mocked_dataloaders as mocked_dataloaders,
    mocked_dataloaders_for_autoregressive_models as mocked_dataloaders_for_autoregressive_models,
)

_publish(__name__)
