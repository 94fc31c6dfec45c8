"""Published path of version comparisons."""

from ..config.packages import compare_versions
from ..runtime.devices.abilities import is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
