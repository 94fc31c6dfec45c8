"""The published module `accelerate.commands.launch`."""

from meshwright.commands.launch import (
    launch_command as launch_command,
    launch_command_parser as launch_command_parser,
    main as main,
)
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
