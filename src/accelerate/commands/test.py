"""The published module `accelerate.commands.test`."""

from meshwright.commands.test import (
    main as main,
    test_command as test_command,
    test_command_parser as test_command_parser,
)
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
