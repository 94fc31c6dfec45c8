"""Run accelerate 1.15's own tests, from its published sdist, here; what fails, on 1.15 too. Name what fails here only.

The tests bring helpers and scripts of their own, `accelerate.test_utils`. They are laid over a temporary copy of this
package; nothing of them is kept. A name that a test imports and that is not ours raises where it is called, so that it
fails its own test and not the whole file. The scripts run as well, on one process and on two. In the libraries' venv:

    python -m tests.ecosystem.published_tests [TESTS ...]

What was found is recorded in `found_tests.tsv`, from which docs/conformance.md is made. TESTS names files, tests or
scripts that are run again: `tests/test_hooks.py`, `scripts/test_sync.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[2]
REFERENCE = Path(sys.prefix) / "reference"
VERSION = "1.15.0"
REASONS = Path(__file__).with_name("published_tests.tsv")
"""Test, or the beginning of one -> one of `KINDS`, and the reason why it fails here."""
FOUND = Path(__file__).with_name("found_tests.tsv")
"""Test or script -> the result of its last run here, and under 1.15 if it failed here."""
KINDS = ("ours to mend", "different on purpose", "internals")
SECONDS = 600
TOOLS = ("parameterized", "pytest-timeout")
_MISSING = """

class {name}:
    def __init__(self, *arguments, **options):
        raise NotImplementedError("{name} is not ours")
"""


def fetch(folder: Path) -> Path:
    """Download and unpack the sdist, and install what its tests need; return its folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    sources = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([*pip, "download", *sources, f"accelerate=={VERSION}"], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "tools"), *TOOLS], check=True)
    with tarfile.open(folder / f"accelerate-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"accelerate-{VERSION}"


def copy_ours(folder: Path, published: Path) -> Path:
    """Copy this package with the helpers of the published tests; return the folder to import it from."""
    ours = folder / "ours"
    for package in ("meshwright", "accelerate"):
        shutil.copytree(REPOSITORY / "src" / package, ours / package)
    shutil.rmtree(ours / "accelerate" / "test_utils")
    shutil.copytree(published / "src" / "accelerate" / "test_utils", ours / "accelerate" / "test_utils")
    return ours


def add_missing_names(ours: Path, log: str) -> bool:
    """Give our copy the names that an import did not find; tell whether there were any."""
    found = set(re.findall(r"ImportError: cannot import name '(\w+)' from 'accelerate[\w.]*' \(([^)]+)\)", log))
    for name, file in found:
        assert Path(file).is_relative_to(ours), f"{file} is not in the copy"
        with open(file, "a", encoding="utf-8") as module:
            module.write(_MISSING.format(name=name))
    return bool(found)


def variables(published: Path, path: Path) -> dict[str, str]:
    """Return the environment in which the package at a path is `accelerate`."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(path), str(published.parent / "tools"))),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(published.parent / "hf"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_scripts(published: Path, path: Path, wanted: list[str]) -> dict[str, str]:
    """Run the scripts, all or those that are named, on one process and on two; return the result of each."""
    folder = published / "src" / "accelerate" / "test_utils"
    found = {}
    for file in sorted((folder / "scripts").rglob("test_*.py")):
        name = str(file.relative_to(folder))
        for size in (1, 2) if not wanted or name in wanted else ():
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}", file]
            cpu = {"ACCELERATE_USE_CPU": "1"}
            with tempfile.TemporaryDirectory() as directory:
                try:
                    code = subprocess.run(
                        command,
                        cwd=directory,
                        env=variables(published, path) | cpu,
                        capture_output=True,
                        timeout=SECONDS,
                    ).returncode
                except subprocess.TimeoutExpired:
                    code = -1
            found[f"{name} on {size}"] = "failure" if code else "passed"
    return found


def run(published: Path, path: Path, tests: list[str], *options: str) -> tuple[dict[str, str], str]:
    """Run tests on the package at a path; return the result of each, and what pytest said."""
    results = published.parent / "results.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--timeout={SECONDS}", "--tb=line", "--continue-on-collection-errors"]
    said = subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"--junitxml={results}", *options, *tests],
        cwd=published, env=variables(published, path), capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = ends.pop() if ends else "passed"
    return found, said


def read_reasons() -> dict[str, tuple[str, str]]:
    """Return kind and reason by test, or by the beginning of tests."""
    rows = [line.split("\t") for line in REASONS.read_text(encoding="utf-8").splitlines()[1:]]
    assert all(kind in KINDS for _, kind, _ in rows), f"{REASONS.name}: a kind is none of {', '.join(KINDS)}"
    return {test: (kind, reason) for test, kind, reason in rows}


def main(wanted: list[str]) -> int:
    """Run the named tests and scripts, or all; print what fails here only, with its reason; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="published-tests-") as directory:
        rows = compare(Path(directory), wanted)
    write_found((read_found() if wanted else {}) | rows)
    reasons = read_reasons()
    failed = fails_here(rows)
    print("| test | here | kind | reason |\n| --- | --- | --- | --- |")
    for test, result in failed.items():
        print(f"| {test} | {result} | {' | '.join(reason_of(test, reasons))} |")
    passed = sum(result == "passed" for result, _ in rows.values())
    unexplained = [test for test in failed if not reason_of(test, reasons)[0]]
    print(
        f"{passed} of the {passed + len(failed)} tests and scripts that pass here or on {VERSION} pass here; "
        f"{len(unexplained)} are not explained"
    )
    return 1 if unexplained else 0


def compare(folder: Path, wanted: list[str]) -> dict[str, tuple[str, str]]:
    """Run tests and scripts here, and what fails also on 1.15; return both results by test."""
    scripts = [name for name in wanted if name.startswith("scripts/")]
    tests = [name for name in wanted if name not in scripts] or ([] if wanted else ["tests"])
    published = fetch(folder)
    ours = copy_ours(folder, published)
    while add_missing_names(ours, run(published, ours, tests or ["tests"], "--collect-only")[1]):
        pass
    here = run(published, ours, tests)[0] if tests else {}
    if scripts or not wanted:
        here |= run_scripts(published, ours, scripts)
    failed = [test for test, result in here.items() if result in ("failure", "error")]
    there = {}
    if again := [node_of(test) for test in failed if not test.startswith("scripts/")]:
        there |= run(published, REFERENCE, again)[0]
    if again := [test.partition(" on ")[0] for test in failed if test.startswith("scripts/")]:
        there |= run_scripts(published, REFERENCE, again)
    return {test: (result, there.get(test, "not collected") if test in failed else "") for test, result in here.items()}


def node_of(test: str) -> str:
    """Return what pytest calls a test, from its class and name in the report."""
    where, _, name = test.partition("::")
    folder, module, *inside = where.split(".")
    return "::".join([f"{folder}/{module}.py", *inside, name])


def write_found(rows: dict[str, tuple[str, str]]) -> None:
    """Record results."""
    lines = [f"{test}\t{here}\t{there}\n" for test, (here, there) in sorted(rows.items())]
    FOUND.write_text("test\there\taccelerate 1.15\n" + "".join(lines), encoding="utf-8")


def read_found() -> dict[str, tuple[str, str]]:
    """Return what the last run of all found: the results here and under 1.15, by test."""
    rows = [line.split("\t") for line in FOUND.read_text(encoding="utf-8").splitlines()[1:]] if FOUND.exists() else []
    return {test: (here, there) for test, here, there in rows}


def fails_here(rows: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return the result here of what passes under 1.15 only."""
    return {test: here for test, (here, there) in rows.items() if there == "passed"}


def reason_of(test: str, reasons: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return kind and reason of a failure; an empty kind where nobody knows it."""
    return next((found for begin, found in reasons.items() if test.startswith(begin)), ("", "NOT EXPLAINED"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
