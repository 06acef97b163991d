"""The table of exchanges agrees with `--help` and the keys of the config. test_reference.py of docs checks its page."""

import re

from jaxpar import config as configs
from jaxpar.config_help import describe_keys
from jaxpar.exchange.named import EXCHANGES, OPTION_VALUES


def test_help_lists_the_exchanges() -> None:
    [listed] = re.findall(r"gradients or weights: (.*?)\. Pipelines", " ".join(describe_keys("exchange").split()))
    assert sorted(listed.split(", ")) == sorted(EXCHANGES)


def test_options_are_keys_of_the_config() -> None:
    keys = configs.default_config().exchange_options
    assert set(keys) == OPTION_VALUES.keys() == {key for row in EXCHANGES.values() for key in row.options}
    for row in EXCHANGES.values():
        assert all(keys.get_type(key) is type(default) for key, default in row.options.items())
