"""Run readers on damaged inputs: `python -m tests.fuzzing [TARGET ...] [--inputs N] [--seed N] [--atheris]`."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import warnings
from contextlib import suppress

from meshwright.errors import InvalidDataError

from .targets import TARGETS, Target, attributes, changed_since


def run(name: str, target: Target, inputs: int, seed: int) -> int:
    """Return the number of inputs that were read; raise what a reader raises besides its one error, with the input."""
    seeds, rng, read = target.seeds(), random.Random(seed), 0
    for content in seeds:
        target.read(content)
    before = attributes()
    for number in range(inputs):
        content = target.mutate(seeds, rng)
        began = time.monotonic()
        try:
            target.read(content)
            read += 1
        except InvalidDataError:
            pass
        except BaseException as error:
            raise AssertionError(f"{name}, input {number} of seed {seed}: {content!r}") from error
        if (seconds := time.monotonic() - began) > 20:
            raise AssertionError(f"{name}, input {number} of seed {seed} took {seconds:.0f} s: {content!r}")
    assert changed_since(before) == [], f"{name}: an input of seed {seed} has changed a class or a module"
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    options = parser.parse_args()
    if options.list:
        print(*TARGETS, sep="\n")
        return
    warnings.simplefilter("ignore")
    if options.atheris:
        run_with_atheris(TARGETS[options.targets[0]], options.inputs)
    for name in options.targets:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read = run(name, TARGETS[name], options.inputs, options.seed)
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        print(
            f"{name}: {options.inputs:,} inputs in {time.monotonic() - began:.0f} s, {read:,} read, others refused; "
            f"at most {more} MiB of memory more",
            flush=True,
        )


def run_with_atheris(target: Target, inputs: int) -> None:
    """Let atheris choose inputs by what they cover; it ends the process."""
    import atheris

    def read(content: bytes) -> None:
        with suppress(InvalidDataError):
            target.read(content)

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-runs={inputs}"], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
