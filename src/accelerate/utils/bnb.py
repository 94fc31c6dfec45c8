"""The published module `accelerate.utils.bnb`."""

from meshwright.inference.quantized import (
    get_keys_to_not_convert as get_keys_to_not_convert,
    get_parameter_device as get_parameter_device,
    get_quantized_model_device_map as get_quantized_model_device_map,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    load_and_quantize_model as load_and_quantize_model,
    quantize_and_offload_8bit as quantize_and_offload_8bit,
    replace_with_bnb_layers as replace_with_bnb_layers,
)
from meshwright.published import publish as _publish

_publish(__name__)
