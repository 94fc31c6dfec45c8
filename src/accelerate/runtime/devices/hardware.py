"""Query the hardware of this machine, with the published functions."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass

import torch
from packaging.version import Version

from ...errors.callers import warn
from ..process import ProcessInfo
from . import device as devices

_SAFE_KERNEL = "5.5.0"


@dataclass(frozen=True)
class CPUInformation:
    """The ranks and world sizes of a process, as its launcher sets them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's ranks and world sizes, without starting a process group."""
    process = ProcessInfo.from_environment()
    return CPUInformation(process.rank, process.world_size, process.local_rank, process.local_world_size)


def get_current_device_type() -> tuple[str, str]:
    """Return the type of this machine's accelerator, and the distributed type of several processes that use it."""
    device = devices.default_device()
    return device.type, str(devices.distributed_type_of(device).value)


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of this machine's accelerators, and their number."""
    if not torch.accelerator.is_available():
        return [], 0
    module, count = devices.device_module(devices.default_device()), torch.accelerator.device_count()
    return [str(module.get_device_name(index)) for index in range(count)], count


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"The driver's version is asked for by nvidia-smi, which failed: {error}.") from error
    return answer.strip().splitlines()[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether NVIDIA's GPUs here reach each other directly; True where there are not two of them.

    The answer is the driver's.
    """
    if not devices.has_accelerator("cuda"):
        return True
    others = range(1, torch.cuda.device_count())
    return all(torch.cuda.can_device_access_peer(0, other) for other in others)


def check_cuda_fp8_capability() -> bool:
    """Return whether this machine's accelerator multiplies matrices in fp8."""
    return devices.supports_fp8(devices.default_device())


def check_os_kernel() -> None:
    """Warn of a Linux kernel under which many processes were seen to hang."""
    if platform.system() != "Linux":
        return
    version = re.match(r"\d+(\.\d+)*", platform.release())
    if version is not None and Version(version[0]) < Version(_SAFE_KERNEL):
        warn(
            f"This machine's kernel is {version[0]}: below {_SAFE_KERNEL} training on several processes may hang. "
            "Update it.",
        )
