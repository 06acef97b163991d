"""Measures the accuracy cost of exchanges: the score of a config with each exchange, compared with ddp.

    scripts/python scripts/bench/accuracy.py [--config=configs/quickstart.py] [--replicas=4] [--exchanges=ddp,dp,..]
        [--workdir=runs/accuracy] [--config.KEY=VALUE ...]

Each exchange is trained by the command line in a separate process. Runs with results in the workdir are not repeated.
"""

import json
import subprocess
import sys
from pathlib import Path

from jaxpar import config as configs
from jaxpar import tasks
from jaxpar.command_line import Parser, integer, names
from jaxpar.errors import exit_code
from jaxpar.exchange import EXCHANGES


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--replicas", type=integer(1), default=4, help="number of replicas")
    parser.add_argument(
        "--exchanges", type=names(EXCHANGES), default=list(EXCHANGES), help="exchanges to compare (default: all)"
    )
    parser.add_argument("--workdir", type=Path, default=Path("runs/accuracy"), help="directory of the runs")
    arguments, overrides = parser.parse_with_overrides()
    overrides += [f"--config.mesh.{key}={arguments.replicas}" for key in ("data", "virtual_cpu_devices")]
    config = configs.load_config(arguments.config)
    configs.override(config, overrides)
    score = tasks.find_task(config).score
    print(f"{'exchange':36} {score.key:>14} {'minus ddp':>18}", flush=True)
    values: list[float] = []
    for name in dict.fromkeys(["ddp", *arguments.exchanges]):
        result = train(arguments.config, arguments.workdir / name, [*overrides, f"--config.exchange={name}"])
        values.append(result[score.key])
        value, difference = format(values[-1], score.format), format(values[-1] - values[0], f"+{score.format}")
        print(f"{name:36} {value:>14} {difference:>18} {result['wire_bytes'] / 1e6:8.3f} MB per step", flush=True)


def train(config: str, workdir: Path, overrides: list[str]) -> dict[str, float]:
    """Return the result of a run, and train it if there is no result yet."""
    path = workdir / "result.json"
    if not path.is_file():
        command = [sys.executable, "-m", "jaxpar.main", f"--config={config}", f"--workdir={workdir}", *overrides]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    result: dict[str, float] = json.loads(path.read_text())
    return result


if __name__ == "__main__":
    sys.exit(exit_code(main))
