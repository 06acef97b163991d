"""The commands of `jaxpar NAME`: a file for each, which is imported only if it is the one to run."""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from jaxpar.errors import UserError, exit_code, nearest

COMMANDS = {
    "train": "trains a model from a config, or resumes a run",
    "launch": "starts several processes of one run on this machine",
    "doctor": "examines what a run needs before it starts: versions, network, clocks, files",
    "plan": "finds the fastest strategy on a cluster, which need not exist",
    "fit": "finds the largest batch that fits on GPUs",
    "audit": "compares the traffic and memory of a compiled step with theory",
    "certify": "compares a strategy with one device, layer by layer",
    "predict": "applies a trained model to a file, a pipe, or texts that you enter",
    "generate": "continues texts with a trained language model",
    "serve": "serves a trained model over HTTP",
    "export": "writes a trained model in the format of other programs",
    "replay": "repeats the runs of an outer step, and compares them bit by bit",
    "compare runs": "compares finished or unfinished runs",
    "compare strategies": "trains a config with every strategy, and compares them",
    "compare pipelines": "compares pipeline schedules by the time to an accuracy",
    "compare updates": "compares asynchronous updates by what stale gradients cost",
    "draw": "draws a pipeline schedule",
    "simulate": "computes the times, idle times and memory of a pipeline schedule",
    "partition": "divides a profiled model into stages and replicas",
    "partition profile": "measures the layers of a model for `jaxpar partition`",
    "swarm": "trains a live swarm on this machine, drawn in the terminal",
    "swarm simulate": "simulates pipelines over unreliable peers",
}
HELP = ("--help", "-h")


def run_command() -> None:
    """Run the command line of this process, and end the process. Signals are blocked until a command handles them."""
    words = sys.argv[1:]
    name = find_command(words)
    if name is None:
        sys.exit(exit_code(lambda: _describe(words)))
    module = import_module(f"jaxpar.commands.{name.replace(' ', '_')}")
    if name == "train":
        module.run()
    code = exit_code(lambda: module.main(words[len(name.split()) :]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on, Ctrl-C ends the process without a traceback
    sys.exit(code)


def find_command(words: Sequence[str]) -> str | None:
    """Return the command that the words begin with; None if there is none. Flags alone are those of train."""
    for number in (2, 1):
        if " ".join(words[:number]) in COMMANDS:
            return " ".join(words[:number])
    return "train" if words and words[0].startswith("-") and words[0] not in HELP else None


def _describe(words: Sequence[str]) -> None:
    """Print the commands. Raises UserError unless the words ask for them."""
    if not words or words[0] not in HELP:
        similar = nearest(" ".join(words[:2]), COMMANDS) or nearest(" ".join(words[:1]), COMMANDS)
        value = f"is {words[0]!r}" if words else "is missing"
        raise UserError(f"the command {value}; it must be one of {', '.join(COMMANDS)}{similar and '.' + similar}")
    print("usage: jaxpar COMMAND [FLAGS]\n")
    print("\n".join(f"  {name:20}{text}" for name, text in COMMANDS.items()))
    print("\njaxpar COMMAND --help describes the flags of a command.")
