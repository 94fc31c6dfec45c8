"""The published module `accelerate.utils.transformer_engine`."""

from meshwright.precision.transformer_engine import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from meshwright.published import publish as _publish

_publish(__name__)
