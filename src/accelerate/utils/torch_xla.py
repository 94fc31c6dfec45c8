"""The published module `accelerate.utils.torch_xla`."""

from meshwright.published import publish as _publish
from meshwright.runtime.devices.xla import install_xla as install_xla

_publish(__name__)
