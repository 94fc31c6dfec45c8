"""The published package `accelerate.commands.menu`."""

from .selection_menu import BulletMenu as BulletMenu
