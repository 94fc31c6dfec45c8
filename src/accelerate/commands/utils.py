"""The published module `accelerate.commands.utils`."""

from meshwright.commands.arguments import (
    CustomArgumentGroup as CustomArgumentGroup,
    CustomArgumentParser as CustomArgumentParser,
)
from meshwright.published import publish as _publish

_publish(__name__)
