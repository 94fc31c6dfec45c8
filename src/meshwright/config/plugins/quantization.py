"""How the weights of linear layers are stored in 8 or 4 bits. Holds values; torch is imported when one is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...errors import UnsupportedSettingError
from ..enums import CustomDtype

_FORMATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CODES = ("fp4", "nf4")
BACKENDS = ("bitsandbytes", "torchao")


@dataclass
class BnbQuantizationConfig:
    """Configure the format of quantised weights, the backend, and the modules that are not quantised."""

    load_in_8bit: bool = False
    """Weights in int8 with a scale per row."""
    llm_int8_threshold: float = 6.0
    """Inputs of a larger magnitude are multiplied in 16 bits (bitsandbytes); 0 multiplies all of them in 8."""
    load_in_4bit: bool = False
    """Weights in 4 bits with a scale per block of 64 (bitsandbytes only)."""
    bnb_4bit_quant_type: str = "fp4"
    """What the 16 codes mean: "fp4", or "nf4", which is made for weights with a normal distribution."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales too, which saves 0.4 bits per weight."""
    bnb_4bit_compute_dtype: Any = "fp16"
    """The format in which 4-bit layers multiply: "fp32", "fp16", "bf16" or a torch.dtype."""
    torch_dtype: Any = None
    """The format of everything that is not quantised; by default fp16, or with 4 bits `bnb_4bit_compute_dtype`."""
    skip_modules: list[str] | None = None
    """Modules that are not quantised, by name; by default the output layer and what is tied to it."""
    keep_in_fp32_modules: list[str] | None = None
    """Modules that are not quantised and stay in fp32, by name."""
    backend: Literal["bitsandbytes", "torchao"] = "bitsandbytes"
    """The library that quantises. torchao supports int8 weights here; its layers stay `nn.Linear`. Not published."""

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not True or False.")
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(f"load_in_4bit and load_in_8bit can't be both {self.load_in_8bit}: choose one.")
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(self.llm_int8_threshold, (int, float)):
            raise ValueError(f"llm_int8_threshold={self.llm_int8_threshold!r} is not a number.")
        if self.bnb_4bit_quant_type not in _CODES:
            raise ValueError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is unknown: choose one of {', '.join(_CODES)}."
            )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list) and all(isinstance(key, str) for key in value)):
                raise ValueError(f"{name}={value!r} is not a list of names of modules.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else "fp16"
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        self._check_backend()

    def _check_backend(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is unknown: choose one of {', '.join(BACKENDS)}.")
        if self.backend == "torchao" and self.load_in_4bit:
            raise UnsupportedSettingError(
                "load_in_4bit with backend='torchao'",
                "its 4-bit kernels are made for particular devices.",
                "Use backend='bitsandbytes', or load_in_8bit=True.",
            )

    @property
    def target_dtype(self) -> Any:
        """The format of a quantised weight, for the sizes in a device map."""
        import torch

        return torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _dtype(name: str, value: Any) -> Any:
    import torch

    if isinstance(value, str):
        if value not in _FORMATS:
            raise ValueError(
                f"{name}={value!r} is unknown: choose one of {', '.join(_FORMATS)}, or give a torch.dtype."
            )
        return getattr(torch, _FORMATS[value])
    if not isinstance(value, torch.dtype):
        raise ValueError(f"{name}={value!r} is neither one of {', '.join(_FORMATS)} nor a torch.dtype.")
    return value
