"""The published module `accelerate.commands.tpu`."""

from meshwright.commands.config.tpu import (
    tpu_command_launcher as tpu_command_launcher,
    tpu_command_parser as tpu_command_parser,
)
from meshwright.published import publish as _publish

_publish(__name__)
