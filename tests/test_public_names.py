"""The public names: all there, at their published paths, and cheap to import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import accelerate
import accelerate.big_modeling
import accelerate.data_loader
import accelerate.hooks
import accelerate.launchers
import accelerate.utils
import meshwright

FACADES: list[ModuleType] = [
    accelerate,
    accelerate.big_modeling,
    accelerate.data_loader,
    accelerate.hooks,
    accelerate.launchers,
    accelerate.utils,
    *(
        importlib.import_module(f"accelerate.utils.{name}")
        for name in (
            "ao",
            "constants",
            "dataclasses",
            "environment",
            "memory",
            "modeling",
            "offload",
            "operations",
            "other",
            "random",
        )
    ),
]


def in_a_fresh_interpreter(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("name", meshwright.__all__)
def test_a_public_name_is_the_published_object(name: str) -> None:
    """Where the interface has the name, both packages mean the same object."""
    paths = [module for module in FACADES if name in dir(module)] if name != "__version__" else []
    assert all(getattr(module, name) is getattr(meshwright, name) for module in paths)


@pytest.mark.parametrize("module", FACADES, ids=lambda module: module.__name__)
def test_every_name_that_is_announced_is_there(module: ModuleType) -> None:
    announced = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    assert announced
    assert len(set(announced)) == len(announced)
    for name in announced:
        assert getattr(module, name) is not None
    namespace: dict[str, object] = {}
    exec(f"from {module.__name__} import *", namespace)
    assert set(announced) <= set(namespace)
    assert set(announced) <= set(dir(module))


def test_a_name_is_the_same_object_at_all_its_paths() -> None:
    for name in set(accelerate.__all__) & set(accelerate.utils.__all__):
        assert getattr(accelerate, name) is getattr(accelerate.utils, name)
    assert accelerate.skip_first_batches is accelerate.data_loader.skip_first_batches


@pytest.mark.parametrize(
    "path",
    [
        "accelerate.accelerator.Accelerator",
        "accelerate.local_sgd.LocalSGD",
        "accelerate.logging.MultiProcessAdapter",
        "accelerate.logging.get_logger",
        "accelerate.optimizer.AcceleratedOptimizer",
        "accelerate.optimizer.move_to_device",
        "accelerate.scheduler.AcceleratedScheduler",
        "accelerate.state.AcceleratorState",
        "accelerate.state.GradientState",
        "accelerate.state.PartialState",
        "accelerate.state.is_initialized",
        "accelerate.utils.memory.should_reduce_batch_size",
        "accelerate.utils.operations.DistributedOperationException",
        "accelerate.utils.wait_for_everyone",
    ],
)
def test_published_paths(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_modules_and_constants_that_tests_of_other_libraries_look_at() -> None:
    program = """
import accelerate
assert "utils" not in vars(accelerate)
print(accelerate.utils.constants.BETA_TP_AVAILABLE_PYTORCH_VERSION, accelerate.utils.constants.FSDP2_PYTORCH_VERSION)
print(accelerate.tracking.LOGGER_TYPE_TO_CLASS["wandb"].__name__)
print(*[name for name in accelerate._MODULES if getattr(accelerate, name).__name__ != f"accelerate.{name}"])
"""
    assert in_a_fresh_interpreter(program).split() == ["2.3.0", "2.6.0", "WandBTracker"]


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'accelerate' has no attribute 'Acelerator'"):
        _ = accelerate.Acelerator  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        exec("from accelerate import Acelerator")


def test_everyone_can_wait() -> None:
    accelerate.utils.wait_for_everyone()


def test_importing_the_package_imports_nothing_and_its_names_come_when_they_are_used() -> None:
    program = """
import sys, meshwright
before = "torch" in sys.modules
kwargs = meshwright.GradScalerKwargs(init_scale=2.0)
after_a_plugin = "torch" in sys.modules
state = meshwright.PartialState
print(before, after_a_plugin, "torch" in sys.modules)
print("GradScalerKwargs" in vars(meshwright), "Accelerator" in vars(meshwright), "Accelerator" in dir(meshwright))
"""
    assert in_a_fresh_interpreter(program).split() == ["False", "False", "True", "True", "False", "True"]


def test_an_accelerator_brings_no_package_that_is_optional() -> None:
    program = """
import importlib.metadata as metadata, re, sys

def needs(distribution, known):
    if distribution not in known:
        known.add(distribution)
        try:
            requirements = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            return known
        for requirement in requirements:
            if "extra ==" not in requirement:
                needs(re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-"), known)
    return known

import torch  # brings what it finds, tqdm and pydot among them

at_start = {name.partition(".")[0] for name in sys.modules}
from meshwright import Accelerator
Accelerator(cpu=True)
imported = {name.partition(".")[0] for name in sys.modules} - at_start
providers = metadata.packages_distributions()
brought = {provider.lower().replace("_", "-") for name in imported for provider in providers.get(name, [])}
print(sorted(brought - needs("meshwright", set())))
"""
    assert in_a_fresh_interpreter(program) == "[]"


@pytest.mark.parametrize("package", ["meshwright", "accelerate"])
def test_an_accelerator_is_imported_without_what_few_scripts_use(package: str) -> None:
    # DTensor brings sympy: together they take a third of the time of torch, in every process that is launched.
    program = f"""
import sys, torch
at_start = set(sys.modules)
from {package} import Accelerator
heavy = ["sympy", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"]
print([name for name in heavy if name in sys.modules and name not in at_start])
"""
    assert in_a_fresh_interpreter(program) == "[]"
