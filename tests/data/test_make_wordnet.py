import importlib.util
import lzma
from pathlib import Path

import pytest

from jaxpar.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_wordnet.py"
LICENCE = "  1 This software  \n  2   \n  3 WordNet 3.1 Copyright 2011\n"
PARTS = {
    "noun": "00001740 03 n 01 entity 0 000 | that which is  perceived | or known  \n"
            "00001741 18 n 01 x 0 000 | a person  \n",
    "verb": "00001742 29 v 01 breathe 0 000 | draw air; \"I can breathe\"  \n",
    "adj": "00001743 44 a 01 able 0 000 | able  \n00001744 00 s 01 able 0 000 | able  \n"
           "00001745 00 s 01 x 0 000 | able  \n",
    "adv": "00001746 02 r 01 ably 0 000 | ably  \n",
}  # fmt: skip


def test_synsets_become_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("make_wordnet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "dict").mkdir()
    for name, lines in PARTS.items():
        (tmp_path / "dict" / f"data.{name}").write_text(LICENCE + lines)
    monkeypatch.setattr(script, "DIRECTORY", tmp_path / "out")
    monkeypatch.setattr("sys.argv", ["make_wordnet.py", str(tmp_path)])
    script.main()
    assert lzma.decompress((tmp_path / "out" / "glosses.tsv.xz").read_bytes()).decode().splitlines() == [
        "text\tlabel",
        "that which is perceived | or known\tnoun.Tops",
        "a person\tnoun.person",
        'draw air; "I can breathe"\tverb.body',
        "able\tadj.ppl",
        "able\tadj.all",
        "ably\tadv.all",
    ]
    assert (tmp_path / "out" / "LICENSE").read_text() == "This software\n\nWordNet 3.1 Copyright 2011\n"
    assert capsys.readouterr().out.startswith("6 pairs, 6 classes, ")
    assert len(set(script.LEXNAMES)) == 45
    for arguments, message in (([], "the argument PACKAGE is missing"), ([str(tmp_path / "out")], "no file data.noun")):
        monkeypatch.setattr("sys.argv", ["make_wordnet.py", *arguments])
        with pytest.raises(UserError, match=message):
            script.main()
