"""Import DeepSpeed without what takes longest and is not tested here: MLflow, and the compiler for its Muon."""

import os
from contextlib import suppress
from unittest.mock import patch

from tests.warm import without_mlflow

with without_mlflow(), patch.dict(os.environ, DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1"), suppress(ImportError):
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
