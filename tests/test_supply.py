"""What the gate installs has a hash, and what the wheel needs can be listed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
CI = REPOSITORY / ".ci"
WITHOUT_HASH = {"meshwright", "torch"}
"""This checkout, and what has another build on every machine."""
pytestmark = pytest.mark.skipif(not CI.is_dir(), reason="the sdist has no .ci")


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Return the version of every package of a lock, and how many hashes it has."""
    blocks = re.split(r"\n(?=\S)", (CI / "locks" / f"{name}.txt").read_text())
    pins = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", block) for block in blocks]
    return {
        canonicalize_name(pin[1]): (pin[2], block.count("--hash=sha256:"))
        for pin, block in zip(pins, blocks, strict=True)
        if pin is not None
    }


def asked_for(*files: str) -> list[Requirement]:
    lines = [line for file in files for line in (CI / file).read_text().splitlines()]
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def of_project(*lists: str) -> list[Requirement]:
    text = (REPOSITORY / "pyproject.toml").read_text()
    found = [re.search(rf"\n{name} = \[(.*?)\]\s*(?:#.*)?\n(?=\w|\n)", text, re.DOTALL) for name in lists]
    return [Requirement(word) for each in found if each for word in re.findall(r'"([^"]+)"', each[1])]


@pytest.mark.parametrize(
    ("lock", "files", "lists"),
    [
        ("main", ("trackers.txt", "images.txt", "build.txt"), ("dependencies", "test", "quality", "docs")),
        ("libraries", ("libraries.txt", "build.txt"), ("dependencies",)),
        ("vision", ("vision.txt",), ()),
        ("accelerate", ("reference.txt",), ()),
        ("reference", ("reference.txt",), ()),
        ("uv", ("uv.txt",), ()),
    ],
)
def test_every_package_that_the_gate_installs_has_a_hash(
    lock: str, files: tuple[str, ...], lists: tuple[str, ...]
) -> None:
    text = (CI / "locks" / f"{lock}.txt").read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text), "a lock names no index"
    pins = locked(lock)
    assert all(hashes for _, hashes in pins.values())
    wanted = [*asked_for(*files), *of_project(*lists)]
    assert wanted
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name in WITHOUT_HASH and lock in ("main", "libraries"):
            assert name not in pins
            continue
        version, _ = pins[name]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: run .ci/lock"


def test_the_gate_installs_from_locks_only() -> None:
    for script in ("run", "fast", "install_libraries"):
        lines = (CI / script).read_text().splitlines()
        assert not [line for line in lines if re.match(r"\s*install \S", line)], script
    assert "UV_INDEX_STRATEGY" not in (CI / "uv.sh").read_text()


@pytest.mark.parametrize(
    "file", sorted((CI.parent / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem
)
def test_a_workflow_only_calls_what_anybody_can_run(file: Path) -> None:
    steps = [step for job in yaml.safe_load(file.read_text())["jobs"].values() for step in job["steps"]]
    commands = [line.strip() for step in steps for line in step.get("run", "").splitlines()]
    tools = ("pip", "python", "pytest", "mkdocs", "mike", "hatchling", "meshwright")
    assert [line for line in commands if any(re.search(rf"\b{tool}\b", line) for tool in tools)] == []
    called = {line.split()[0] for line in commands if line.startswith(".ci/")}
    assert called
    assert all(os.access(CI.parent / script, os.X_OK) for script in called)


def test_the_bill_of_materials_lists_what_the_wheel_needs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, CI / "sbom", tmp_path / "sbom.json"], check=True, cwd=tmp_path)
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "meshwright"
    components = {component["name"]: component for component in bill["components"]}
    direct = {canonicalize_name(requirement.name) for requirement in of_project("dependencies")}
    assert {"torch", "numpy", "safetensors"} <= direct <= components.keys()
    for name, component in components.items():
        assert component["purl"] == f"pkg:pypi/{name}@{component['version']}"
        assert component["licenses"]
    assert all(len(each["content"]) == 64 for each in components["safetensors"]["hashes"])
    refs = {component["bom-ref"] for component in [*bill["components"], bill["metadata"]["component"]]}
    assert {each for entry in bill["dependencies"] for each in entry["dependsOn"]} <= refs
