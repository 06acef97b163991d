"""What lossy exchanges cost in accuracy: the test accuracy of a config under each, next to ddp's.

    scripts/python scripts/bench/accuracy.py [--config=configs/quickstart.py] [--replicas=4] [--exchanges=ddp,dp,..]
        [--workdir=runs/accuracy] [--config.KEY=VALUE ...]

Each is trained by the training binary, in a process of its own; what is in the workdir already is not run again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

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
    reference = 0.0
    for name in names:
        result = train(arguments.config, arguments.workdir / name, [*overrides, f"--config.exchange={name}"])
        reference = reference or result["test_accuracy"]
        points = 100 * (result["test_accuracy"] - reference)
        sent = f"{result['wire_bytes'] / 1e6:8.3f} MB a step"
        print(f"{name:36} {result['test_accuracy']:7.2%}  {points:+6.2f} points  {sent}", flush=True)


def train(config: str, workdir: Path, overrides: list[str]) -> dict[str, float]:
    """The result of a run."""
    found = workdir / "result.json"
    if not found.is_file():
        command = [sys.executable, "-m", "jaxpar.main", f"--config={config}", f"--workdir={workdir}", *overrides]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    result: dict[str, float] = json.loads(found.read_text())
    return result


if __name__ == "__main__":
    main()
