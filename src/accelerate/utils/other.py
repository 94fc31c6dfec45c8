"""Published path of what fits nowhere else."""

from ..commands.config.default import write_basic_config
from ..parallel.unwrapping import extract_model_from_parallel, is_compiled_module
from ..runtime.bars import tqdm
from ..runtime.runtime import Runtime
from ..saving import clean_state_dict_for_safetensors, save


def wait_for_everyone() -> None:
    """Wait until every process has come here."""
    Runtime.current().barrier()


__all__ = [
    "clean_state_dict_for_safetensors",
    "extract_model_from_parallel",
    "is_compiled_module",
    "save",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]
