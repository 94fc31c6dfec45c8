"""Numbers as people read them."""

from __future__ import annotations

GIB = float(1 << 30)
_UNITS = ((GIB, "GiB"), (float(1 << 20), "MiB"), (1024.0, "KiB"))


def size(count: float) -> str:
    """Return bytes with a binary unit: `61.2 GiB`."""
    for unit, name in _UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.{_digits(count / unit)}f} {name}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """Return a count in short form: `8.03 B`, `512`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= unit:
            shown = count / (1e3 if name == "k" else unit)
            return f"{shown:.{_digits(shown)}f} {name}"
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """Return seconds with the unit that suits them."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.{_digits(seconds * 1e3)}f} ms"


def share(part: float, whole: float) -> str:
    """Return a part as a percentage."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def mesh(axes: dict[str, int]) -> str:
    """Return a mesh in words."""
    return " x ".join(f"{axis} {number}" for axis, number in axes.items() if number > 1) or "one process"


def module_name(name: str) -> str:
    """Return the name of a module as its owner knows it: `module.layers.*.mlp` -> `mlp in each of layers`."""
    name = f"{name}.".removeprefix("module.").removesuffix(".")  # what DDP wraps
    outer, star, inner = name.rpartition("*")
    if not star:
        return name
    each = f"each of {module_name(outer.removesuffix('.'))}" if outer else "each block"
    return f"{inner.removeprefix('.')} in {each}" if inner else each


def _digits(number: float) -> int:
    return 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
