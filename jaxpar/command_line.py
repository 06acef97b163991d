"""Command lines of commands other than `jaxpar train`, whose mistakes are reported in the same words as its own."""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxpar.errors import UserError, nearest, printable
from jaxpar.files import run_of, unwritable

EXAMPLE = "--config=configs/quickstart.py --workdir=runs/quickstart"  # flags that `jaxpar train` requires
OVERRIDE = " or --config.KEY=VALUE"  # what else an argument can be if a command takes overrides
BEHIND = ", or follow --, as the arguments of `jaxpar train` do"  # if a command passes some on


class Parser(argparse.ArgumentParser):
    """A parser of flags and arguments that raises UserError for a mistake."""

    def __init__(self, description: str | None, prog: str | None = None, others: str = "") -> None:
        """Make a parser with the flag --help.

        others: what an argument can be instead of a flag of this parser, as the end of an error message.
        """
        super().__init__(
            prog, None, description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        self._others = others
        self._required: dict[str, tuple[str, str, str]] = {}  # arguments of `missing`, by name in argparse's errors

    def require(self, name: str, example: str, *, rule: str = "set", **options: Any) -> None:
        """Add a flag, or an argument without a flag, that the command line must contain. options: of `add_argument`.

        example, rule: for the error message, a part of a command line that contains it, and what it must be.
        """
        if name.startswith("-"):
            self.add_argument(name, required=True, **options)
            self._required[name] = (name, example, rule)
        else:
            self.add_argument(name, metavar=name.upper(), **options)
            self._required[name.upper()] = (f"the argument {name.upper()}", example, rule)

    def add_names(self, flag: str, choices: Iterable[str]) -> None:
        """Add a flag whose value is a list of some of `choices`, by default all."""
        choices = list(choices)
        self.add_argument(
            flag, type=names(choices), default=choices, help=f"some of {', '.join(choices)} (default: all)"
        )

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse `argv`, by default the command line of this process."""
        argv = sys.argv[1:] if argv is None else argv
        flags = self._option_string_actions
        for argument in argv:
            if argument.startswith("--") and argument.partition("=")[0] not in flags:
                raise unknown(argument, flags, self._others)
        arguments, rest = self.parse_known_args(argv)
        if rest:
            raise unknown(rest[0], flags, self._others)
        return arguments

    def parse_with_overrides(self, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse `argv`, by default the command line of this process. Also return its overrides of the config."""
        self._others = OVERRIDE
        others, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        return self.parse(others), overrides

    def parse_before_training(
        self, argv: Sequence[str], example: str, reserved: Collection[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `argv` up to `--`. Also return the arguments of `jaxpar train`, which follow it.

        example: flags of this parser, for an error message. reserved: flags of `jaxpar train` that this command sets.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        arguments, rest = self.parse(argv[:end]), list(argv[end + 1 :])
        flags = {argument.partition("=")[0].lstrip("-") for argument in rest if argument.startswith("-")}
        for name in sorted(flags & set(reserved)):
            raise UserError(f"--{name} is set by `{self.prog}`; remove it from the arguments after --")
        for name in ("config", "workdir"):
            if name not in flags and "help" not in flags:
                raise missing(f"--{name}", f"{self.prog} {example} -- {EXAMPLE}")
        return arguments, rest

    def error(self, message: str) -> NoReturn:
        """Raise a UserError for an error of argparse: `argument NAME: REASON`, or a list of missing arguments."""
        name, _, reason = message.removeprefix("argument ").partition(": ")
        if not message.startswith("argument "):
            raise missing(*self._required[reason.split(", ")[0]])
        if reason.startswith("expected"):
            raise no_value(name)
        if reason.startswith("ignored explicit argument "):
            value = reason.removeprefix("ignored explicit argument ")
            raise UserError(f"{name} is {value}; it must be set without a value")
        raise UserError(f"{name} is {reason}")


def unknown(argument: str, flags: Iterable[str], others: str) -> UserError:
    """Return the error for an argument that is neither one of `flags`, such as `--workdir`, nor one of `others`."""
    if not argument.startswith("-"):
        return UserError(f"{argument!r} is not an argument; it must be a flag that --help lists{others}")
    flag = argument.partition("=")[0]
    key = flag.partition(".")[2]
    choices = [*(known for known in flags if known != "--help"), *([f"--config.{key}"] if key else [])]
    hint = nearest(flag, choices)
    return UserError(f"{flag} is not a flag; it must be one that --help lists{others}{hint and '.' + hint}")


def missing(name: str, example: str, rule: str = "set") -> UserError:
    """Return the error for a flag or an argument that the command line must contain. See `Parser.require`."""
    return UserError(f"{name} is missing; it must be {rule}, as in {example}")


def no_value(flag: str) -> UserError:
    """Return the error for a flag, such as `--workdir`, at whose value the command line ends."""
    return UserError(f"{flag} has no value; it must be written {flag}=VALUE")


def split_overrides(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate the overrides, --config.KEY=VALUE or --config.KEY VALUE, from the other arguments, and return both."""
    arguments = list(arguments)
    others: list[str] = []
    overrides: list[str] = []
    while arguments:
        argument, *arguments = arguments
        name = argument.lstrip("-")
        if not argument.startswith("-") or not name.startswith(("config.", "noconfig.")):
            others.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and arguments and not arguments[0].startswith("--"):
            overrides.append(arguments[0])
            arguments = arguments[1:]
    return others, overrides


def check_folder(flag: str, path: Path) -> None:
    """Raise UserError unless the file or directory that a flag names is in an existing directory."""
    if not path.parent.is_dir():
        raise UserError(f"{flag} is {str(path)!r}; it must be in an existing directory, and '{path.parent}' is not one")


def check_absent(flag: str, path: Path, kind: str = "file") -> None:
    """Raise UserError unless a flag names a new file, or a new or empty directory, in an existing directory."""
    is_empty = kind == "directory" and path.is_dir() and not any(path.iterdir())
    if (path.exists() or path.is_symlink()) and not is_empty:
        raise UserError(f"{flag} is {str(path)!r}, which exists; it must be a new {kind}")
    check_folder(flag, path)


@contextlib.contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Within `with`, raise UserError instead of an OSError of the file that a flag names."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} is {str(path)!r}; it must be {unwritable(path, error)}") from error


def check_new_file(flag: str, path: Path, suffixes: Sequence[str] = ("",), config: str = "") -> None:
    """Raise UserError unless a flag names a file with one of the suffixes in an existing folder.

    config: the file that the command loads, as PATH:PRESET, which must be another one.
    """
    if not path.name.endswith(tuple(suffixes)) or path.is_dir() or not path.absolute().parent.is_dir():
        kind = " ".join(["a", *filter(None, suffixes), "file"])
        raise UserError(f"{flag} is {str(path)!r}; it must be the path of {kind} in a folder that exists")
    if config and path.resolve() == Path(config.partition(":")[0]).resolve():
        raise UserError(f"{flag} is {str(path)!r}; it must be another file than that of --config, which it loads")


def log_line(line: str) -> None:
    """Print a line to stderr, because stdout contains what the command computes."""
    print(printable(line), file=sys.stderr, flush=True)


# ---- types of flags: their errors are the end of a message, after `--FLAG is` -----------------------------------


def integer(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """Return the type of a flag whose value is an integer in this range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value}; it must be at least {minimum}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"{value}; it must be at most {maximum}")
        return value

    return parse


def number(rule: str, minimum: float = 0, maximum: float = math.inf) -> Callable[[str], float]:
    """Return the type of a flag whose value is a finite number in this range. rule: the range, for an error message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and minimum <= value <= maximum):
            raise argparse.ArgumentTypeError(f"{text!r}; it must be {rule}")
        return value

    return parse


def output_path(text: str) -> Path:
    """Return the path of a file or folder to write, which must not belong to a run. The type of a flag."""
    if run := run_of(Path(text)):
        raise argparse.ArgumentTypeError(f"{text!r}, which belongs to the run in {str(run)!r}; it must be another path")
    return Path(text)


def choice(choices: Iterable[str], *, ignore_case: bool = False) -> Callable[[str], str]:
    """Return the type of a flag whose value is one of `choices`. ignore_case: which are in lower case."""
    choices = list(choices)

    def parse(text: str) -> str:
        value = text.lower() if ignore_case else text
        if value not in choices:
            raise _no_choice(text, value, "one of", choices)
        return value

    return parse


def names(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the type of a flag whose value is a list of some of `choices`, separated by commas."""
    choices = list(choices)

    def parse(text: str) -> list[str]:
        values = [name.strip() for name in text.split(",")]
        for value in values:
            if value not in choices:
                raise _no_choice(text, value, "one or more of", choices)
        return list(dict.fromkeys(values))

    return parse


def _no_choice(text: str, value: str, rule: str, choices: list[str]) -> argparse.ArgumentTypeError:
    hint = nearest(value, choices)
    return argparse.ArgumentTypeError(f"{text!r}; it must be {rule} {', '.join(choices)}{hint and '.' + hint}")


# ---- output -----------------------------------------------------------------------------------------------------


def format_rows(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """Return rows of cells as lines with columns of equal width. right: align all but the first column right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust, *[str.rjust if right else str.ljust] * (len(widths) - 1)]
    lines = ("  ".join(pad(cell, n) for pad, cell, n in zip(pads, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
