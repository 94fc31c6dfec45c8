"""The published module `accelerate.commands.estimate`."""

from meshwright.commands.estimate_memory import (
    estimate_command as estimate_command,
    estimate_command_parser as estimate_command_parser,
    main as main,
)
from meshwright.inference.estimating.definitions import add_timm_hub_prefix as add_timm_hub_prefix
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
