"""Query the hardware of this machine, with the published functions."""

from __future__ import annotations

import logging
import platform
import re
from dataclasses import dataclass

from ..process import ProcessInfo
from . import device as devices, nvidia

logger = logging.getLogger(__name__)
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
    names = devices.names()
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver."""
    return nvidia.driver_version()


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the driver can be trusted about direct access between NVIDIA's GPUs, also where there are none.

    CUDA is not initialised. `meshwright launch` sets NCCL_P2P_DISABLE and NCCL_IB_DISABLE where the answer is False.
    """
    return nvidia.p2p_fault() is None


def check_cuda_fp8_capability() -> bool:
    """Return whether this machine's accelerator multiplies matrices in fp8."""
    return devices.supports_fp8(devices.default_device())


def check_os_kernel() -> None:
    """Warn of a Linux kernel under which many processes were seen to hang."""
    from packaging.version import Version  # imported on use: few scripts ask

    if platform.system() != "Linux":
        return
    version = re.match(r"\d+(\.\d+)*", platform.release())
    if version is not None and Version(version[0]) < Version(_SAFE_KERNEL):
        logger.warning(
            f"This machine's kernel is {version[0]}: below {_SAFE_KERNEL} training on several processes may hang. "
            "Update it."
        )
