"""The published module `accelerate.commands.merge`."""

from meshwright.commands.merge_weights import (
    main as main,
    merge_command as merge_command,
    merge_command_parser as merge_command_parser,
)
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
