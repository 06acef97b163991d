"""Describes the config keys for --help, with the comments of configs/default.py, and formats a config as flags."""

import ast
import io
import re
import shlex
import shutil
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.errors import UserError, nearest

TOP = "config"  # section of the keys that are in no other
MAX_COLUMNS = 100  # of the text, unless the terminal is narrower


class Described(NamedTuple):
    """A key or a section of the default config with its comment."""

    name: str  # dotted name
    comment: str  # the comment next to its line or, if there is none, the comment above it
    heading: str  # the comment above a key that also has one next to its line, for this key and those below it
    is_section: bool


def describe_overview() -> str:
    """Return a line for each section of the config: its name and the first sentence of its comment."""
    every = list(described())
    top = ", ".join(one.name for one in every if "." not in one.name and not one.is_section)
    lines = {TOP: top} | {one.name: one.comment.partition(". ")[0].rstrip(".") for one in every if one.is_section}
    width = max(map(len, lines))
    return "\n".join(_wrapped(f"{name:{width}}  {text}", "  ", width + 2) for name, text in lines.items())


def describe_keys(topic: str) -> str:
    """Return the keys of a section, or a single key, as flags with their defaults and comments."""
    topic, every, defaults = topic.removeprefix(f"{TOP}."), list(described()), configs.keys(configs.default_config())
    if topic == TOP:
        chosen = [one for one in every if "." not in one.name and not one.is_section]
    else:
        chosen = [one for one in every if one.name == topic or one.name.startswith(f"{topic}.")]
    if not chosen:
        sections = [TOP, *(one.name for one in every if one.is_section)]
        hint = nearest(topic, [*sections, *(one.name for one in every)])
        stop = "." if hint else ""
        raise UserError(f"--help is {topic!r}; it must be a key, or one of {', '.join(sections)}{stop}{hint}")
    blocks = []
    for one in chosen:
        if one.heading and len(chosen) > 1:
            blocks.append(_wrapped(one.heading, ""))
        title = f"{TOP}.{one.name}" if one.is_section else format_flag(one.name, defaults[one.name])
        blocks.append(f"{title}\n{_wrapped(one.comment, '    ')}")
    return "\n".join(blocks)


def described() -> Iterator[Described]:
    """Yield the keys and sections of configs/default.py, in their order."""
    source = (configs.config_folder() / "default.py").read_text()
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    sections = {"config": ""}  # name of a variable -> section
    before = function.lineno  # the last line of the statement above
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            variable, _, rest = ast.unparse(target).partition(".")
            name = f"{sections[variable]}.{rest}".removeprefix(".")
            sections |= {other.id: name for other in node.targets if isinstance(other, ast.Name)}
            inline = comments.get(node.end_lineno or node.lineno, "")
            first = node.lineno  # of the comment right above the statement
            while first - 1 > before and first - 1 in comments:
                first -= 1
            above = " ".join(comments[line] for line in range(first, node.lineno))
            is_section = ast.unparse(node.value) == "ConfigDict()"
            yield Described(name, inline or above, above if inline else "", is_section)
        before = node.end_lineno or node.lineno


def _wrapped(text: str, indent: str, hanging: int = 0) -> str:
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    below = indent + " " * hanging
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=below, break_on_hyphens=False)


def wrapped_text(text: str) -> str:
    """Return a text for the width of the terminal. Paragraphs are filled; an indented line continues below its text."""
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        if paragraph:
            lines.append(_wrapped(" ".join(paragraph), ""))
            paragraph = []
        content = line.lstrip()
        code = re.match(r"\d+ +", content)  # an exit code, with its meaning behind it
        lines.append(_wrapped(content, line[: -len(content)], len(code[0]) if code else 4) if content else "")
    return "\n".join(lines)


def format_flags(config: ConfigDict) -> str:
    """Return a line for each key, as a flag that a shell reads, with the default of each key that differs from it."""
    defaults = configs.keys(configs.default_config())
    lines = []
    for key, value in configs.keys(config).items():
        default = "" if value == defaults[key] else f"  # default: {_text(defaults[key])}"
        lines.append(format_flag(key, value) + default)
    return "\n".join(lines)


def format_flag(key: str, value: Any) -> str:
    """Return `--config.KEY=VALUE`, quoted for a shell if necessary."""
    return shlex.quote(f"--{TOP}.{key}={_text(value)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
