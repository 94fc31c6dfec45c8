"""Ask NVIDIA's driver for its GPUs without CUDA, which must not be initialised before a fork. Imports no torch."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from . import machine

PCI_VENDOR = "0x10de"
_FIRST_DRIVER_WITHOUT_P2P_FAULT = 550
_MODELS_WITH_P2P_FAULT = re.compile(r"\bRTX 40[5-9]0\b")
_SECONDS_FOR_NVIDIA_SMI = 20.0


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU, as the driver's files in `/proc` describe it."""

    address: str
    """Its PCI address, such as 0000:1b:00.0."""
    model: str
    uuid: str


def is_present() -> bool:
    """Return whether a GPU of NVIDIA is here, on WSL too."""
    return machine.has_device_files("nvidia[0-9]*", "dxg")


def gpus() -> list[GPU]:
    """Return the GPUs whose device file is here, by PCI address; [] where the driver has no files (WSL, Jetson)."""
    found = []
    for folder in sorted((machine.ROOT / "proc/driver/nvidia/gpus").glob("*")):
        lines = (machine.read(folder / "information") or "").splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if machine.has_device_files(f"nvidia{facts.get('Device Minor', '')}"):
            found.append(GPU(address=folder.name, model=facts.get("Model", ""), uuid=facts.get("GPU UUID", "")))
    return found


def driver_version() -> str:
    """Return the version of the driver, from its file or from nvidia-smi."""
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", machine.read("proc/driver/nvidia/version") or "")
    return version[1] if version is not None else query("driver_version")[0]


def query(fact: str) -> list[str]:
    """Return one fact of every GPU, from nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS_FOR_NVIDIA_SMI)
        lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the query of nvidia-smi for {fact} failed: {error}. Is NVIDIA's driver here?") from error
    if not lines:
        raise RuntimeError(f"the query of nvidia-smi for {fact} printed nothing. Is there a GPU on this machine?")
    return lines


def p2p_fault() -> str | None:
    """Return which GPUs the driver wrongly takes to reach each other directly; None where it can be trusted.

    Drivers before 550 report peer access between GeForce RTX 40 GPUs, which do not have it, and NCCL hangs or corrupts
    data. The answer is from the models and the driver's version, so CUDA is not initialised.
    """
    if not is_present():
        return None
    try:
        models = [gpu.model for gpu in gpus()] or query("name")
        affected = [model for model in models if _MODELS_WITH_P2P_FAULT.search(model)]
        if len(models) < 2 or not affected:
            return None
        driver = driver_version()
    except RuntimeError:  # no file of the driver and no nvidia-smi: nothing is known
        return None
    is_fixed = int(driver.partition(".")[0]) >= _FIRST_DRIVER_WITHOUT_P2P_FAULT
    return None if is_fixed else f"{affected[0]}, driver {driver}"
