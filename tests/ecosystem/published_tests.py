"""Run accelerate 1.15's own tests, from its published sdist, on 1.15 and here, and name those that fail here only.

The tests bring helpers and scripts of their own, `accelerate.test_utils`. They are laid over a temporary copy of this
package; nothing of them is kept. A name that a test imports and that is not ours raises where it is called, so that it
fails its own test and not the whole file. In the libraries' venv:

    python -m tests.ecosystem.published_tests [TESTS ...]
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
KINDS = ("ours to mend", "different on purpose", "internals")
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


def run(published: Path, path: Path, tests: list[str], *options: str) -> tuple[dict[str, str], str]:
    """Run tests on the package at a path; return the result of each, and what pytest said."""
    results = published.parent / "results.xml"
    variables = {
        "PYTHONPATH": os.pathsep.join((str(path), str(published.parent / "tools"))),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(published.parent / "hf"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = ["-q", "-p", "no:cacheprovider", "--timeout", "600", "--tb=line", "--continue-on-collection-errors"]
    said = subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"--junitxml={results}", *options, *tests],
        cwd=published, env=os.environ | variables, capture_output=True, text=True, check=False,
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


def main(tests: list[str]) -> int:
    """Run the named tests, or all; print what fails here only, with its reason, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="published-tests-") as directory:
        published = fetch(Path(directory))
        ours = copy_ours(Path(directory), published)
        wanted = tests or ["tests"]
        while add_missing_names(ours, run(published, ours, wanted, "--collect-only")[1]):
            pass
        here, _ = run(published, ours, wanted)
        there, _ = run(published, REFERENCE, wanted)
    reasons, unexplained = read_reasons(), 0
    meant = [test for test, result in there.items() if result == "passed"]
    print("| test | here | kind | reason |\n| --- | --- | --- | --- |")
    for test in meant:
        if (result := here.get(test, "not collected")) == "passed":
            continue
        kind, reason = next(
            (found for begin, found in reasons.items() if test.startswith(begin)), ("", "NOT EXPLAINED")
        )
        unexplained += not kind
        print(f"| {test} | {result} | {kind} | {reason} |")
    passed = sum(here.get(test) == "passed" for test in meant)
    print(f"{passed} of the {len(meant)} tests that pass on {VERSION} pass here; {unexplained} are not explained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
