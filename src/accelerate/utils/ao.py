"""The published module `accelerate.utils.ao`."""

from meshwright.precision.fp8 import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    filter_linear_layers as filter_linear_layers,
    find_first_last_linear_layers as find_first_last_linear_layers,
    has_ao_layers as has_ao_layers,
)
from meshwright.published import publish as _publish

_publish(__name__)
