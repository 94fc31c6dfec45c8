"""Show the fields of a dataclass as the parameters of its constructor: one list, instead of a heading for each."""

from __future__ import annotations

from typing import Any

import griffe


class FieldsAsParameters(griffe.Extension):
    """Move the docstrings below fields into the `Args:` of the class."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Rewrite one dataclass."""
        if cls.docstring is None or not any(
            decorator.callable_path.endswith("dataclass")
            for decorator in cls.decorators
        ):
            return
        fields = [
            field
            for field in cls.attributes.values()
            if field.docstring is not None and _is_a_field(field)
        ]
        if fields:
            lines = "".join(
                f"\n    {field.name}: {_in_one_line(field.docstring)}"
                for field in fields
            )
            cls.docstring.value += f"\n\nArgs:{lines}"
        for field in fields:
            field.docstring = None  # what has none is not shown again


def _is_a_field(attribute: griffe.Attribute) -> bool:
    return attribute.annotation is not None and "property" not in attribute.labels


def _in_one_line(docstring: griffe.Docstring | None) -> str:
    return "" if docstring is None else " ".join(docstring.value.split())
