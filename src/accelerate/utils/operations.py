"""The published module `accelerate.utils.operations`."""

from meshwright.errors import DistributedOperationException as DistributedOperationException
from meshwright.published import publish as _publish
from meshwright.runtime.collectives.nested import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    concatenate as concatenate,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size,
    find_device as find_device,
    get_data_structure as get_data_structure,
    get_shape as get_shape,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from meshwright.runtime.collectives.operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    gather as gather,
    gather_object as gather_object,
    gather_tensor_shape as gather_tensor_shape,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    reduce as reduce,
    verify_operation as verify_operation,
)

from .dataclasses import TensorInformation as TensorInformation

_publish(__name__)
