"""The published module `accelerate.commands.config.config`."""

from meshwright.commands.config.config import (
    config_command as config_command,
    config_command_parser as config_command_parser,
    get_user_input as get_user_input,
    main as main,
)
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
