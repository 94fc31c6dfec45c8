"""The published module `accelerate.inference`."""

from meshwright.inference.pipeline import prepare_pippy as prepare_pippy
from meshwright.published import publish as _publish

_publish(__name__)
