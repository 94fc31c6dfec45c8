"""What packages read about the distribution `accelerate` when meshwright stands for it."""

from __future__ import annotations

import ast
import base64
import hashlib
import os
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import _meshwright_start as start

from . import __version__


@cache
def interface_version() -> str:
    """Return the version of the published package, without importing it."""
    for node in ast.parse(Path(start.FOLDER, "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["__version__"]:
                return str(node.value.value)
    raise AssertionError(f"{start.FOLDER} has no version")


def metadata() -> str:
    """Return the metadata of the distribution `accelerate` that meshwright is."""
    return "\n".join(
        (
            "Metadata-Version: 2.4",
            "Name: accelerate",
            f"Version: {interface_version()}",
            "Summary: The interface of accelerate, implemented by meshwright. Independent of Hugging Face.",
            # The interface is documented there. sentence-transformers looks for the owner's name in this field.
            "Home-page: https://huggingface.co/docs/accelerate",
            "License-Expression: Apache-2.0",
            "Requires-Python: >=3.10",
            f"Requires-Dist: meshwright=={__version__}",
            "Provides-Extra: deepspeed",
            f'Requires-Dist: meshwright[deepspeed]=={__version__}; extra == "deepspeed"',
            "Description-Content-Type: text/markdown",
            "",
            "This distribution is named `accelerate` and is not Hugging Face's. It has the published names of",
            f"accelerate {interface_version().partition('+')[0]}; meshwright, an independent project, implements them.",
            "",
        )
    )


_WHEEL = "Wheel-Version: 1.0\nGenerator: meshwright\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_COMMANDS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "accelerate-config": "accelerate.commands.config",
    "accelerate-estimate-memory": "accelerate.commands.estimate",
    "accelerate-launch": "accelerate.commands.launch",
    "accelerate-merge-weights": "accelerate.commands.merge",
}


def write_wheel(folder: str | os.PathLike[str]) -> Path:
    """Write the distribution `accelerate` as a wheel, from what is installed. The same wheel comes out every time."""
    name = f"accelerate-{interface_version()}"
    info = f"{name}.dist-info"
    package = Path(start.FOLDER)
    sources = sorted(file for file in package.rglob("*") if file.suffix == ".py" or file.name == "py.typed")
    files = {f"accelerate/{file.relative_to(package).as_posix()}": file.read_bytes() for file in sources}
    commands = "".join(f"{command} = {module}:main\n" for command, module in _COMMANDS.items())
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{commands}".encode()
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = Path(folder) / f"{name}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = ZipInfo(path)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content, ZIP_DEFLATED)
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


class PublishedDistribution(Distribution):
    """The distribution `accelerate` as `importlib.metadata` shows it. It has no folder of its own."""

    def read_text(self, filename: str) -> str | None:
        """Return one of its files."""
        if filename == "METADATA":
            return metadata()
        return {"top_level.txt": "accelerate\n", "INSTALLER": "meshwright\n"}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return where a file of it would be."""
        return Path(start.FOLDER).parent / path
