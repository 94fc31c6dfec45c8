"""The published module `accelerate.commands.to_fsdp2`."""

from meshwright.commands.to_fsdp2 import (
    ConversionStatus as ConversionStatus,
    convert_config_to_fsdp2 as convert_config_to_fsdp2,
    load_config as load_config,
    to_fsdp2_command as to_fsdp2_command,
    to_fsdp2_command_parser as to_fsdp2_command_parser,
)
from meshwright.published import publish as _publish

_publish(__name__)
