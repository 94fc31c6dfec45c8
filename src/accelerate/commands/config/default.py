"""The published module `accelerate.commands.config.default`."""

from meshwright.commands.config.default import (
    default_command_parser as default_command_parser,
    default_config_command as default_config_command,
    write_basic_config as write_basic_config,
)
from meshwright.published import publish as _publish

_publish(__name__)
