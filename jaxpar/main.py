"""The binary: reads the flags, starts JAX, trains, and turns the outcome into an exit code.

    scripts/train --config=configs/NAME.py[:PRESET] --workdir=DIR [--config.KEY=VALUE ...]
        [--stopped_exit_code=N] [--coordinator_address=HOST:PORT --num_processes=N --process_id=I]

The last three place one of several processes, where no cluster does (docs/processes.md); scripts/launch starts several
on one machine.

Exit codes: 0 finished, or stopped by a signal with everything saved, for which --stopped_exit_code is another one;
1 training failed; 2 a mistake of the user's, reported in one line; 3 the process hung, and reported where;
130 a second Ctrl-C, which waits for nothing.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from logging import CRITICAL, getLogger
from pathlib import Path

from absl import flags, logging
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.errors import FAILED, STOPPED_CODES, USER_ERROR, TrainingError, UserError, is_failure
from jaxpar.files import disk_error
from jaxpar.launch.launcher import end_with_launcher
from jaxpar.launch.place import COMMAND, FLAGS, find_place
from jaxpar.launch.signals import Ending, Interrupt, StoppedEarly


def run() -> None:
    """The `jaxpar` command."""
    end_with_launcher()
    sys.unraisablehook = _hide_late_reads
    try:
        code = main(sys.argv)
    except Exception:
        if not _has_others():
            raise
        traceback.print_exc()
        code = FAILED
    if is_failure(code) and _has_others():  # JAX would wait for those that wait for this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_others() -> bool:
    """Whether this is one of several processes, which have met."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _hide_late_reads(unraisable: "sys.UnraisableHookArgs") -> None:
    """Where one read of a damaged checkpoint fails, orbax ends its event loop, and the others complain one by one."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    # Orbax, and asyncio under it, log as errors, with tracebacks, what they also raise.
    logging.set_verbosity(logging.FATAL)
    getLogger("asyncio").setLevel(CRITICAL)
    try:
        return _main(list(argv))
    except UserError as error:
        return _fail(str(error), USER_ERROR)
    except TrainingError as error:
        return _fail(str(error), FAILED)
    except OSError as error:
        if not disk_error(error):
            raise
        what = f"{error.filename or 'the disk'}: {error.strerror}"
        return _fail(f"{what}; the checkpoints that are there are whole", USER_ERROR)


def _main(argv: list[str]) -> int:
    arguments, overrides = _split(argv[1:])
    values = _flags()
    try:
        rest = values([argv[0], *arguments])[1:]
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from error
    if values.help:
        print(__doc__)
        print(f"Configs: {', '.join(f'configs/{file.name}' for file in sorted(configs.config_folder().glob('*.py')))}")
        return 0
    if rest:
        raise UserError(f"{rest[0]!r} is not an argument; there are --config, --workdir and --config.KEY=VALUE")
    for name in ("config", "workdir"):
        if not values[name].value:
            raise UserError(
                f"--{name} is missing; for example --config=configs/quickstart.py --workdir=runs/quickstart"
            )
    stopped = values.stopped_exit_code
    if is_failure(stopped):
        raise UserError(
            f"--stopped_exit_code is {stopped}; it must be 0, or {STOPPED_CODES[0]} to {STOPPED_CODES[-1]}: "
            "others have a meaning"
        )
    config = configs.load_config(values.config)
    configs.override(config, overrides)
    place = {name: values[name].value for name in FLAGS}
    with Ending(nth=1, code=stopped, text=lambda: _stopped(argv, early=not Interrupt.was_entered)):
        return _train(config, Path(values.workdir), place, argv, stopped)


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "Config file, with a preset after a colon.", flag_values=values)
    flags.DEFINE_string("workdir", None, "Where the run lives. A run that is there is continued.", flag_values=values)
    flags.DEFINE_integer("stopped_exit_code", 0, "Of a run that a signal has stopped.", flag_values=values)
    for name, flag in FLAGS.items():
        define = flags.DEFINE_integer if flag.kind is int else flags.DEFINE_string
        define(name, None, flag.help, flag_values=values)
    flags.DEFINE_bool("help", False, "Show this help.", flag_values=values)
    return values


def _train(
    config: ConfigDict, workdir: Path, place: dict[str, str | int | None], argv: list[str], stopped_exit_code: int
) -> int:
    # Imported late: JAX reads its settings from the config first, and --help needs none of it.
    from jaxpar import data, mesh, tasks, train
    from jaxpar.launch import processes

    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    processes.meet_processes(find_place(place))
    try:
        result = train.train(config, workdir)
    except train.Stopped as stopped:
        print(f"{stopped}\n{_resume(argv)}", flush=True)
        return stopped_exit_code
    except StoppedEarly:
        print(_stopped(argv, early=True), flush=True)
        return stopped_exit_code
    print(_closing(result, workdir, tasks.find_task(config).headline), flush=True)
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separates --config.KEY[=VALUE] (and the VALUE that follows where there is no =) from the other flags."""
    others: list[str] = []
    overrides: list[str] = []
    while arguments:
        argument, *arguments = arguments
        name = argument.lstrip("-")
        if not argument.startswith("-") or not name.startswith(("config.", "noconfig.")):
            others.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and arguments and not arguments[0].startswith("--"):
            overrides.append(arguments[0])
            arguments = arguments[1:]
    return others, overrides


def _stopped(argv: Sequence[str], *, early: bool) -> str:
    """Return what to print where a signal has stopped the run outside of its loop, where nothing is to be saved."""
    when = "before the first step" if early else "after the last step, before the result was written"
    return f"stopped {when}\n{_resume(argv)}"


def _resume(argv: Sequence[str]) -> str:
    return f"resume    {_command(argv)}"


def _command(argv: Sequence[str]) -> str:
    """Return the command line as the user can type it again."""
    program = os.environ.get(COMMAND, "python -m jaxpar.main" if argv[0].endswith(".py") else argv[0])
    return " ".join([program, *map(shlex.quote, argv[1:])])


def _closing(result: Mapping[str, object], workdir: Path, headline: str) -> str:
    """Return what to print at the end of a run. headline: its task's."""
    reached = headline.format(**result) if "test_loss" in result else "finished"
    left = {"result.json": "", "metrics.jsonl": "", "curves.png": "", "checkpoints": "/", "tensorboard": "/"}
    results = ", ".join(name + end for name, end in left.items() if (workdir / name).exists())
    return (
        f"\n{reached} after {result['steps']:,} steps, {result.get('examples_per_second', 0):,.0f} examples/s\n"
        f"results   {workdir}/{results}\n"
        "next      the same with a new --workdir and, say, --config.strategy=single or --config.model.size=mini;\n"
        "          your own data: docs/data.md; a pretrained model: configs/wordnet_minilm.py"
    )


def _fail(message: str, code: int) -> int:
    print(f"jaxpar: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    run()
