"""Extension of the documentation: comments at the fields of a class describe its attributes on the API page."""

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Adds a section of attributes to the docstring of a class: the comments at its fields."""

    def on_class_members(self, *, cls: griffe.Class, **_others: Any) -> None:
        """Read the comment that ends the line of a field, or the comment lines above it."""
        assert not isinstance(cls.filepath, list)
        lines = cls.filepath.read_text().splitlines()
        described: list[str] = []
        for name, field in cls.attributes.items():
            if field.docstring or field.lineno is None or field.endlineno is None or name.startswith("_"):
                continue
            end = re.search(r"\s\s# (.*)$", lines[field.endlineno - 1])
            above: list[str] = []
            for line in reversed(lines[: field.lineno - 1]):
                if end or not line.lstrip().startswith("# "):
                    break
                above.insert(0, line.lstrip()[2:])
            if text := end[1] if end else " ".join(above):
                described.append(f"    {name}: {text}")
        if described and cls.docstring:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(described)
