"""The published module `accelerate.launchers`."""

from meshwright.launch.notebook.launcher import (
    debug_launcher as debug_launcher,
    notebook_launcher as notebook_launcher,
)
from meshwright.published import publish as _publish

_publish(__name__)
