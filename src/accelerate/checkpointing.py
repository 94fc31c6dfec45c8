"""The published module `accelerate.checkpointing`."""

from meshwright.checkpoint.custom import (
    load_custom_state as load_custom_state,
    save_custom_state as save_custom_state,
)
from meshwright.published import publish as _publish

_publish(__name__)
