"""Starts several processes of one run on this machine, as torchrun does.

    jaxpar launch --num_processes=2 [--max_restarts=3] -- --config=configs/quickstart.py --workdir=DIR [...]
    jaxpar launch --num_processes=MIN:MAX [--grow_seconds=60] [--max_restarts=3] -- ...

Arguments after -- are passed to `jaxpar train`. The launcher sets --coordinator_address, --num_processes and
--process_id for each process. GPUs are divided equally between the processes, and every line of output is prefixed with
the process number. When one process fails, the launcher kills the others and restarts all of them from the last
checkpoint, up to --max_restarts times. With MIN:MAX, a restart lacks those that failed, down to MIN; in a run with
config.elastic_seconds, the other processes continue without one that fails, unless it is process 0. After
--grow_seconds, the run is stopped, saved and started again with MAX processes. Ctrl-C and SIGTERM are forwarded to all
processes, which save and stop. A second signal stops them without saving, and a third one kills them. No process
outlives the launcher.

Exit codes:
  0      all processes finished, or were stopped by a signal after saving the state (--stopped_exit_code of
         `jaxpar train` replaces 0 for a stopped run)
  2      user error; the processes are not restarted
  other  the exit code of the process that failed, or 128 + N if signal N killed it
"""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence

from jaxpar.command_line import BEHIND, Parser, integer, number, split_overrides
from jaxpar.config import load_config, override
from jaxpar.launch.launcher import GROW_SECONDS, Launch, check_capacity, forwarded, gpus_to_divide, run_processes
from jaxpar.launch.place import FLAGS


def main(argv: Sequence[str]) -> int:
    signals: list[int] = []
    with forwarded(signals):
        parser = Parser(__doc__, "jaxpar launch", BEHIND)
        counts = "number of processes, or MIN:MAX if it can change, 1 or more"
        parser.require("--num_processes", "--num_processes=2", type=process_counts, help=counts)
        restarts = "maximum number of restarts after a failure (default: 0)"
        parser.add_argument("--max_restarts", type=integer(0), default=0, help=restarts)
        grow = f"with MIN:MAX, seconds with fewer processes until MAX are started (default: {GROW_SECONDS:g})"
        parser.add_argument("--grow_seconds", type=number("at least 1", 1), default=GROW_SECONDS, help=grow)
        arguments, rest = parser.parse_before_training(argv, "--num_processes=2", FLAGS)
        least, most = counts = arguments.num_processes
        check_capacity(most)
        gpus = gpus_to_divide(most)
        seconds = elastic_seconds(rest) if least < most else 0
        launch = Launch(counts, arguments.max_restarts, arguments.grow_seconds, seconds, rest, gpus)
        return run_processes(launch, signals)


def process_counts(text: str) -> tuple[int, int]:
    """Return the fewest and the most processes, from N or MIN:MAX."""
    least, colon, most = text.partition(":")
    if colon and not (least and most):
        raise ArgumentTypeError(f"{text!r}; it must be a number, or MIN:MAX")
    counts = integer(1)(least), integer(1)(most or least)
    if counts[0] > counts[1]:
        raise ArgumentTypeError(f"{text}; MIN must be at most MAX")
    return counts


def elastic_seconds(arguments: Sequence[str]) -> int:
    """Return config.elastic_seconds of the arguments of `jaxpar train`; 0 for --help. Raises UserError as it does."""
    others, overrides = split_overrides(arguments)
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-config")
    name = parser.parse_known_args(others)[0].config
    if name is None:
        return 0
    config = load_config(name)
    override(config, overrides)
    return int(config.elastic_seconds)
