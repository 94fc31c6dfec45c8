"""The published module `accelerate.commands.config.update`."""

from meshwright.commands.config.update import (
    update_command_parser as update_command_parser,
    update_config as update_config,
    update_config_command as update_config_command,
)
from meshwright.published import publish as _publish

_publish(__name__)
