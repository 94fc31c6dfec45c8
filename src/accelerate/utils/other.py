"""Published path of what fits nowhere else."""

from ..commands.config.default import write_basic_config
from ..parallel.compilation import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    model_has_dtensor,
)
from ..parallel.unwrapping import extract_model_from_parallel, is_compiled_module
from ..runtime.bars import tqdm
from ..runtime.runtime import Runtime
from ..saving import clean_state_dict_for_safetensors, save


def wait_for_everyone() -> None:
    """Wait until every process has come here."""
    Runtime.current().barrier()


__all__ = [
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "extract_model_from_parallel",
    "has_compiled_regions",
    "is_compiled_module",
    "model_has_dtensor",
    "save",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]
