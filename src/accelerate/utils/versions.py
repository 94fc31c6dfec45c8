"""The published module `accelerate.utils.versions`."""

from meshwright.config.packages import compare_versions as compare_versions
from meshwright.published import publish as _publish
from meshwright.runtime.devices.abilities import is_torch_version as is_torch_version

_publish(__name__)
