"""The published module `accelerate.local_sgd`."""

from meshwright.local_sgd import LocalSGD as LocalSGD
from meshwright.published import publish as _publish

_publish(__name__)
