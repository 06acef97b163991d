"""Plain English: words and forms that documents, docstrings, comments and messages do without."""

import ast
import functools
import re
from typing import NamedTuple

import pytest

from tests.docs.prose import ROOT, code, passages

# A pattern, and what to write instead.
WORDS = {
    r"anew": "again",
    r"as such": "(leave out)",
    r"beside": "next to; besides",
    r"by itself": "alone; automatically",
    r"comes? to": "is; becomes",
    r"cures?": "mitigations",
    r"dearest": "most expensive",
    r"figures?": "metrics; results; numbers",
    r"(go|goes|going|went) on": "continue; resume",
    r"goodness": "metric",
    r"(has|have) not[.,;:)]": "lacks",
    r"hence": "therefore; so",
    r"homes?": "device of a stage",
    r"hungry": "idle",
    r"in words": "(a format_... function)",
    r"judg(e|es|ed|ing)": "compare; check",
    r"current (parameters|params|state|weights)": "newest weights; state",
    r"kept weights": "stashed weights",
    r"knows? (nothing )?of": "contains; depends on; supports",
    r"likewise": "also; the same",
    r"mend(s|ed|ing)?": "repair",
    r"on (its|their) way": "in flight",
    r"packets?": "transfer",
    r"parted": "split",
    r"parts of (a|the|each|every|its) batch": "microbatches; accumulation steps; batch divisor",
    r"rank (of )?[fbw]": "phase",
    r"rows? of (a|the|each|every|its|this) (global |local )?batch": "examples",
    r"(say|says|said|saying)": "log, print, report, return; according to",
    r"so many": "the number of; accumulation",
    r"(speak|speaks|spoken)": "log, print, report",
    r"such an?": "this; a ... like this",
    r"(tell|tells|told)": "log, print, report; distinguish",
    r"who wants": "to ...",
    r"wires?": "transfer; link; route",
}
# Passages that may keep a word of WORDS: file, a part of the line, and why.
ALLOWED = [
    ("jaxpar/use/pages/charts.py", "<figure class='chart'>", "an HTML element"),
    ("jaxpar/use/pages/charts.py", "</figure>", "an HTML element"),
    ("jaxpar/config.py", "asynchronous.cures", "the former name of a key, from which its new name is suggested"),
    ("jaxpar/data/tokenizer.py", "occur in words after", "characters within words of a text"),
]
PREPOSITIONS = ("As", "At", "By", "For", "From", "In", "On", "Per", "To")
# First words of docstrings that begin with half a sentence.
FRAGMENTS = {
    *("And", "How", "It", "Of", "Or", "So", "That", "There", "They", "Those", "What", "When", "Where", "Which", "Who"),
    "Whose",
}
PATTERN = re.compile((r"\b(" + "|".join(WORDS) + r")(?!\w)").replace(" ", r"\s+"), re.IGNORECASE)


class Use(NamedTuple):
    """A refused word in a passage, with its line."""

    file: str
    number: int
    kind: str
    word: str
    line: str


@functools.cache
def uses() -> list[Use]:
    found = []
    for passage in passages():
        for match in PATTERN.finditer(passage.text):
            before = passage.text[: match.start()].count("\n")
            line = passage.text.splitlines()[before].strip()
            found.append(Use(passage.file, passage.line + before, passage.kind, match[0], line))
    return found


def is_allowed(use: Use) -> bool:
    return any(use.file == file and part in use.line for file, part, _ in ALLOWED)


def instead(word: str) -> str:
    """Return what to write in place of a word."""
    return next(better for pattern, better in WORDS.items() if re.fullmatch(pattern.replace(" ", r"\s+"), word, re.I))


def test_words() -> None:
    found = [
        f"{use.file}:{use.number}: {use.kind}: {use.word!r} in {use.line!r}; {instead(use.word)}"
        for use in uses()
        if not is_allowed(use)
    ]
    assert not found, f"{len(found)} passages:\n" + "\n".join(found)


def test_every_exception_is_needed() -> None:
    unused = [(file, part) for file, part, _ in ALLOWED if not any(u.file == file and part in u.line for u in uses())]
    assert not unused


def test_docstrings_begin_with_a_statement() -> None:
    fragments = [
        f"{one.file}:{one.line}: {first}"
        for one in passages()
        if one.kind == "docstring" and is_fragment(first := one.text.strip().splitlines()[0])
    ]
    assert not fragments, f"{len(fragments)} docstrings:\n" + "\n".join(fragments)


def is_fragment(line: str) -> bool:
    """Return whether the first line of a docstring is half a sentence. After a preposition, a comma ends a phrase."""
    first = re.split(r"\W", line, maxsplit=1)[0]
    return first in FRAGMENTS or (first in PREPOSITIONS and "," not in line)


@functools.cache
def errors() -> list[tuple[str, str]]:
    """Return the place of each UserError with a literal message, and the message with {} for its values."""
    found = []
    for path in code():
        source = path.read_text()
        if path.is_relative_to(ROOT / "tests") or "UserError(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "UserError" and node.args:
                text = literal(node.args[0])
                if text is not None:
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return found


def literal(node: ast.expr) -> str | None:
    """Return the text of a string or f-string, with {} for each value; None for another expression."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


KEY_IS_VALUE = re.compile(r"^(config\.|--)[\w.{}-]+ (is|are) ")
# What a user may write instead, or do. Some messages get it as a value, in the place of {}.
HAS_RULE = re.compile(r"\b(must|cannot|has no|does not exist|its keys are|set|use|remove|only if)\b|is \{\}$")


def test_errors_state_what_a_value_must_be() -> None:
    lacking = [f"{place}: {text}" for place, text in errors() if KEY_IS_VALUE.match(text) and not HAS_RULE.search(text)]
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize(("pattern", "why"), [(r"\.$", "a full stop ends it"), (r"\bmay\b", "'may' is for permission")])
def test_errors_have_one_grammar(pattern: str, why: str) -> None:
    wrong = [f"{place}: {text}" for place, text in errors() if re.search(pattern, text)]
    assert not wrong, why + ":\n" + "\n".join(wrong)


def test_the_check_finds_what_it_refuses() -> None:
    assert PATTERN.search("it is likewise told")
    assert not PATTERN.search("a wireless retelling of a homely packetizer")
    assert instead("Told") == WORDS["(tell|tells|told)"]
