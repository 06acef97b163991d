"""The cost of lossy exchanges in accuracy: the score of a config's task under each, next to ddp's.

    scripts/python scripts/bench/accuracy.py [--config=configs/quickstart.py] [--replicas=4] [--exchanges=ddp,dp,..]
        [--workdir=runs/accuracy] [--config.KEY=VALUE ...]

Each is trained by the training binary, in a separate process; what is in the workdir already is not run again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from jaxpar import config as configs
from jaxpar import tasks
from jaxpar.exchange import EXCHANGES


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--exchanges", default=",".join(EXCHANGES))
    parser.add_argument("--workdir", type=Path, default=Path("runs/accuracy"))
    arguments, overrides = parser.parse_known_args()
    names = dict.fromkeys(["ddp", *arguments.exchanges.split(",")])
    overrides += [f"--config.mesh.{key}={arguments.replicas}" for key in ("data", "virtual_cpu_devices")]
    config = configs.load_config(arguments.config)
    configs.override(config, overrides)
    score = tasks.find_task(config).score
    print(f"{'exchange':36} {score.key:>14} {'minus that of ddp':>18}", flush=True)
    values: list[float] = []
    for name in names:
        result = train(arguments.config, arguments.workdir / name, [*overrides, f"--config.exchange={name}"])
        values.append(result[score.key])
        value, difference = format(values[-1], score.format), format(values[-1] - values[0], f"+{score.format}")
        print(f"{name:36} {value:>14} {difference:>18} {result['wire_bytes'] / 1e6:8.3f} MB a step", flush=True)


def train(config: str, workdir: Path, overrides: list[str]) -> dict[str, float]:
    """The result of a run."""
    path = workdir / "result.json"
    if not path.is_file():
        command = [sys.executable, "-m", "jaxpar.main", f"--config={config}", f"--workdir={workdir}", *overrides]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    result: dict[str, float] = json.loads(path.read_text())
    return result


if __name__ == "__main__":
    main()
