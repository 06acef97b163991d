"""Audits the steps of several configs for eight H100s that this machine does not have, in one process.

    python -m tests.absent_gpus '{"NAME": ["--config.KEY=VALUE", ...], ...}'

Prints one JSON object: the audit of each name (`jaxpar audit`), with the schedule and, if the step is one program,
the predicted time.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from jaxpar import config as configs
from jaxpar.cluster.target import find_target
from jaxpar.errors import is_refused
from jaxpar.inspect.audit_report import audit_run
from jaxpar.inspect.step_time import check_step

TINY = ("--config.model.num_layers=2", "--config.model.hidden_size=64", "--config.batch_size=64")


def main() -> None:
    """Audit the configs of the command line."""
    target, audited = find_target("h100:8"), {}
    for name, overrides in json.loads(sys.argv[1]).items():
        config = configs.load_config("configs/quickstart.py")
        configs.override(config, [*TINY, "--config.data.source=synthetic", *overrides])
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            is_one = not is_refused(check_step, config)
            audited[name] = audit_run(config, Path(folder), target, with_program=True, with_time=is_one)
    print(json.dumps(audited))


if __name__ == "__main__":
    main()
