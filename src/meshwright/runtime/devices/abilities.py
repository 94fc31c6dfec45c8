"""`is_..._available`, as published: what is installed here, and what the devices of this machine can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from ...config.packages import compare_versions, has_package
from . import device as devices, xla

F = TypeVar("F", bound=Callable[..., Any])


def _installed(*packages: str) -> Callable[[], bool]:
    def is_available() -> bool:
        return any(has_package(package) for package in packages)

    is_available.__doc__ = f"Return whether {' or '.join(packages)} is installed."
    return is_available


is_aim_available = _installed("aim")
is_amdsmi_available = _installed("amdsmi")
is_boto3_available = _installed("boto3")
is_clearml_available = _installed("clearml")
is_comet_ml_available = _installed("comet_ml")
is_datasets_available = _installed("datasets")
is_deepspeed_available = _installed("deepspeed")
is_dvclive_available = _installed("dvclive")
is_import_timer_available = _installed("import_timer")
is_lomo_available = _installed("lomo_optim")
is_matplotlib_available = _installed("matplotlib")
is_megatron_lm_available = _installed("megatron.core")
is_mlflow_available = _installed("mlflow", "mlflow_skinny")
is_msamp_available = _installed("msamp")
is_pandas_available = _installed("pandas")
is_peft_available = _installed("peft")
is_pynvml_available = _installed("pynvml")
is_pytest_available = _installed("pytest")
is_rich_available = _installed("rich")
is_sagemaker_available = _installed("sagemaker")
is_schedulefree_available = _installed("schedulefree")
is_swanlab_available = _installed("swanlab")
is_tensorboard_available = _installed("tensorboard", "tensorboardX")
is_timm_available = _installed("timm")
is_torchao_available = _installed("torchao")
is_torchdata_available = _installed("torchdata")
is_torchdata_stateful_dataloader_available = _installed("torchdata.stateful_dataloader")
is_torchvision_available = _installed("torchvision")
is_tqdm_available = _installed("tqdm")
is_trackio_available = _installed("trackio")
is_transformer_engine_available = _installed("transformer_engine")
is_transformers_available = _installed("transformers")
is_triton_available = _installed("triton")
is_wandb_available = _installed("wandb")


def _device(kind: str) -> Callable[..., bool]:
    def is_available(check_device: bool = False, **kwargs: Any) -> bool:
        return devices.has_accelerator(kind)

    is_available.__doc__ = f"Return whether this machine has an accelerator of the kind {kind}."
    return is_available


is_cuda_available = _device("cuda")
is_hpu_available = _device("hpu")
is_mlu_available = _device("mlu")
is_musa_available = _device("musa")
is_neuron_available = _device("neuron")
is_npu_available = _device("npu")
is_sdaa_available = _device("sdaa")
is_xpu_available = _device("xpu")


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether this machine has an Apple GPU."""
    return devices.has_accelerator("mps")


def is_rocm_available() -> bool:
    """Return whether torch was built for AMD's accelerators, and one is here."""
    return torch.version.hip is not None and devices.has_accelerator("cuda")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and USE_TORCH_XLA is not false; optionally, with TPUs or GPUs behind it."""
    if not xla.is_used():
        return False
    hardware = xla.kind_of_hardware() if check_is_tpu or check_is_gpu else ""
    return (not check_is_tpu or hardware == "TPU") and (not check_is_gpu or hardware in ("CUDA", "GPU"))


def is_habana_gaudi1() -> bool:
    """Return whether the accelerator is the first Gaudi: not detected in this version."""
    return False


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with process groups."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Return whether torch can use Intel's collectives."""
    return is_torch_distributed_available() and bool(getattr(torch.distributed, "is_xccl_available", bool)())


def is_pippy_available() -> bool:
    """Return whether models can be split into pipeline stages: torch supports it."""
    return is_torch_distributed_available()


def is_weights_only_available() -> bool:
    """Return whether `torch.load` supports `weights_only`: every supported torch does."""
    return True


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy is new enough."""
    return has_package("numpy") and compare_versions("numpy", ">=", min_version)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the default device computes in bf16."""
    return devices.supports_low_precision(devices.default_device(), torch.bfloat16)


def is_fp16_available() -> bool:
    """Return whether the default device computes in fp16."""
    return devices.supports_low_precision(devices.default_device(), torch.float16)


def is_fp8_available() -> bool:
    """Return whether a package that computes in fp8 is installed."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether TransformerEngine has its block format; this version does not use it."""
    return False


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, and new enough."""
    if not has_package("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 8-bit layers."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 4-bit layers."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes runs on other devices than CUDA."""
    return is_bnb_available("0.46.0")


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version: `(">=", "2.7")`."""
    return compare_versions("torch", operation, version)


def _needs(package: str) -> Callable[[F], F]:
    def decorate(func: F) -> F:
        @wraps(func)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not has_package(package):
                raise ImportError(f"{func.__name__} needs the package {package}: pip install {package}.")
            return func(*args, **kwargs)

        return cast("F", checked)

    return decorate


deepspeed_required = _needs("deepspeed")
torchao_required = _needs("torchao")
