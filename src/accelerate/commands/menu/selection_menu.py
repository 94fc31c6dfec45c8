"""The published module `accelerate.commands.menu.selection_menu`."""

from meshwright.commands.config.asking import BulletMenu as BulletMenu
from meshwright.published import publish as _publish

_publish(__name__)
