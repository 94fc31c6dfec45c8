"""The published module `accelerate.commands.env`."""

from meshwright.commands.env import (
    env_command as env_command,
    env_command_parser as env_command_parser,
    main as main,
)
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
