"""The table of exchanges agrees with `--help`, the keys of the config, and docs/reference/exchanges.md."""

import re
from pathlib import Path

from jaxpar import config as configs
from jaxpar.config_help import describe_keys
from jaxpar.core.optimizer import OPTIMIZERS
from jaxpar.exchange.named import EXCHANGES, OPTION_VALUES, NamedExchange

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "exchanges.md"


def table(first_column: str) -> dict[str, list[str]]:
    """Return the other cells of the rows of a table in the docs, by each name in their first cell."""
    lines = DOCS.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_column} |")) + 2
    rows: dict[str, list[str]] = {}
    for line in lines[start : lines.index("", start)]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows |= dict.fromkeys(quoted(names), cells)
    return rows


def quoted(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def optimizers(row: NamedExchange) -> list[str]:
    """Return the optimizers that an exchange needs; empty: any."""
    if row.adamw:
        return [name for name, kind in OPTIMIZERS.items() if kind.is_adamw]
    return [name for name, kind in OPTIMIZERS.items() if row.shards and kind.elementwise]


def test_docs_list_the_exchanges_and_what_they_need() -> None:
    documented = table("`config.exchange`")
    assert documented.keys() == EXCHANGES.keys()
    for name, row in EXCHANGES.items():
        *_, same, of_optimizers, on_gradients = documented[name]
        assert (same == "yes", on_gradients == "yes") == (not row.differs, row.on_gradients), name
        assert quoted(of_optimizers) == optimizers(row), name
        assert optimizers(row) or of_optimizers == "all", name


def test_docs_list_the_options_of_each_exchange() -> None:
    documented = table("Key")
    assert documented.keys() == OPTION_VALUES.keys()
    for key, (values, *_, applies_to) in documented.items():
        names = {name for name in quoted(applies_to) if name in EXCHANGES}
        names = EXCHANGES.keys() - names if applies_to.startswith("all but") else names
        assert names == {name for name, row in EXCHANGES.items() if key in row.options}, key
        if (must := OPTION_VALUES[key].must).startswith("be one of "):
            assert re.sub(r" \(.*?\)", "", values).replace("`", "") == must.removeprefix("be one of "), key


def test_help_lists_the_exchanges() -> None:
    [listed] = re.findall(r"gradients or weights: (.*?)\. Pipelines", " ".join(describe_keys("exchange").split()))
    assert sorted(listed.split(", ")) == sorted(EXCHANGES)


def test_options_are_keys_of_the_config() -> None:
    keys = configs.default_config().exchange_options
    assert set(keys) == OPTION_VALUES.keys() == {key for row in EXCHANGES.values() for key in row.options}
    for row in EXCHANGES.values():
        assert all(keys.get_type(key) is type(default) for key, default in row.options.items())
