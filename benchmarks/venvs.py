"""One virtual environment per contender, and one torch for all of them.

    python -m benchmarks.venvs                            make or complete all of them in `.benchmarks/`
    python -m benchmarks.venvs accelerate --venvs DIR     some of them, elsewhere
    python -m benchmarks.venvs accelerate --base PYTHON   with the packages of this interpreter instead of a new torch

`base` has torch and numpy. Every other one has its contender, and sees `base` through a `.pth` file, which comes after
its own packages and brings none of the `.pth` files (editable installs, say) that lie there: no contender sees another.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
VENVS = REPOSITORY / ".benchmarks"
BASE = ("torch==2.13.0", "numpy")
CONTENDERS: dict[str, tuple[str, ...]] = {
    "ours": ("--editable", str(REPOSITORY), "--editable", str(REPOSITORY / "dropin")),
    # Also where the drop-in distribution of the same name and version can be seen.
    "accelerate": (
        *("--ignore-installed", "--require-hashes", "--no-deps"),
        *("--requirement", str(REPOSITORY / ".ci/locks/reference.txt")),
    ),
    "fabric": ("lightning-fabric==2.6.*", "click"),
    "ray": ("ray[train]==2.60.*",),
}
ONLY_FOR_KILLS = {"torchft": ("torchft==0.2.*",)}
"""Who is measured only by `benchmarks.kills`."""


def interpreters(names: Sequence[str], venvs: Path = VENVS, base: Path | None = None) -> dict[str, Path]:
    """Return an interpreter for every named contender; what is missing is installed."""
    if base is None:
        base = venvs.absolute() / "base/bin/python"
        _install(base, BASE, base)
    packages = _output(base, "import sysconfig; print(sysconfig.get_path('purelib'))")
    found = {}
    for name in names:
        python = venvs.absolute() / name / "bin/python"
        _install(python, (CONTENDERS | ONLY_FOR_KILLS)[name], base, sees=packages)
        found[name] = python
    return found


def _install(python: Path, requirements: Sequence[str], base: Path, sees: str | None = None) -> None:
    """Make the interpreter's venv and install into it, unless that has been done; `base` brings pip."""
    venv = python.parents[1]
    done = venv / "installed.txt"
    wanted = "\n".join([*requirements, sees or ""])
    if done.exists() and done.read_text() == wanted:
        return
    print(f"{venv}: installing {' '.join(requirements)}", file=sys.stderr, flush=True)
    started = time.monotonic()
    own_pip = [] if sees is None else ["--without-pip"]
    maker = sys.executable if sees is None else str(base)
    subprocess.run([maker, "-m", "venv", "--clear", *own_pip, str(venv)], check=True)
    if sees is not None:
        site_packages = Path(_output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
        (site_packages / "base.pth").write_text(f"{sees}\n")
    (venv / "constraints.txt").write_text(f"{BASE[0]}\n")
    install = ["install", "--quiet", "--constraint", str(venv / "constraints.txt"), *requirements]
    subprocess.run([str(base), "-m", "pip", "--python", str(python), *install], check=True)
    done.write_text(wanted)
    print(f"{venv}: ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _output(python: Path, program: str) -> str:
    return subprocess.run([str(python), "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    """Make the venvs and print their interpreters."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.venvs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contenders", nargs="*", help=f"any of {', '.join(CONTENDERS)}; all if none")
    parser.add_argument(
        "--venvs", type=Path, default=VENVS, metavar="DIR", help="where they are (default: %(default)s)"
    )
    parser.add_argument("--base", type=Path, metavar="PYTHON", help="see this interpreter's packages, not a new torch")
    options = parser.parse_args()
    unknown = set(options.contenders) - set(CONTENDERS | ONLY_FOR_KILLS)
    if unknown:
        parser.error(f"unknown contender {', '.join(sorted(unknown))}: choose from {', '.join(CONTENDERS)}")
    for name, python in interpreters(options.contenders or list(CONTENDERS), options.venvs, options.base).items():
        print(f"{name}: {python}")


if __name__ == "__main__":
    main()
