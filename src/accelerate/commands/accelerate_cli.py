"""The published module `accelerate.commands.accelerate_cli`."""

from meshwright.commands.cli import main as main
from meshwright.published import publish as _publish

_publish(__name__)

if __name__ == "__main__":
    main()
