"""Trains a model from a config. If --workdir contains a run, resumes it.

    jaxpar train --config=configs/NAME.py[:PRESET] --workdir=DIR [--config.KEY=VALUE ...]
        [--stopped_exit_code=N] [--coordinator_address=HOST:PORT --num_processes=N --process_id=I]
    jaxpar train --config=configs/NAME.py[:PRESET] [--config.KEY=VALUE ...] --print_config
    jaxpar train --help[=SECTION or KEY]

--coordinator_address, --num_processes and --process_id connect processes that were started by hand, without a cluster
manager (docs/howto/machines.md). To start several processes on one machine, use `jaxpar launch`. --print_config prints
all keys of the config with their values, as flags, and changes nothing.

Exit codes:
  0    finished, or stopped by a signal after saving the state (--stopped_exit_code replaces 0 for a stopped run)
  1    the training failed
  2    user error, reported in one line
  3    the process hung; the stacks of its threads were printed
  130  stopped immediately by a second Ctrl-C, without saving
"""

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict

from jaxpar import command_line, config_help, errors
from jaxpar import config as configs
from jaxpar.command_line import OVERRIDE
from jaxpar.errors import TrainingError, UserError, fail, format_count, printable
from jaxpar.files import disk_error
from jaxpar.host_memory import memory_error
from jaxpar.launch.launcher import end_with_launcher
from jaxpar.launch.place import FLAGS, command_of, find_place, find_survivor
from jaxpar.launch.signals import Ending, Interrupt, Stopped, StoppedEarly

INTACT = "the existing checkpoints are intact"
CLOSED_OUTPUT = f"the reader of the output has closed it, and the run ended; {INTACT}"


def run() -> None:
    """Run the command line of this process, and end the process."""
    end_with_launcher()
    try:
        code = main(sys.argv)
    except Exception:
        if not _has_others():
            raise
        traceback.print_exc()
        code = errors.FAILED
    if errors.is_failure(code) and _has_others():
        # A normal exit would deadlock: JAX waits for processes waiting for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on, Ctrl-C ends the process without a traceback
    sys.exit(code)


def _has_others() -> bool:
    """Return whether this process is connected to other processes."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def main(argv: Sequence[str]) -> int:
    if sys.stdout is None:
        return fail(errors.CLOSED)
    # Orbax and asyncio log the exceptions that they raise as errors, with tracebacks.
    logging.set_verbosity(logging.FATAL)
    getLogger("asyncio").setLevel(CRITICAL)
    try:
        code = _main(list(argv))
        sys.stdout.flush()
        return code
    except UserError as error:
        return fail(str(error))
    except TrainingError as error:
        return fail(str(error), errors.FAILED)
    except (SystemExit, KeyboardInterrupt) as error:  # raised by a user's file, because signals are handled otherwise
        return fail(errors.message_of_exit(error))
    except OSError as error:
        if reason := errors.unwritten_output(error):
            errors.discard(sys.stdout)
            return fail(f"{reason}; {INTACT}")
        if errors.is_closed_output(error):
            errors.discard(sys.stdout)
            is_training = any(argument.partition("=")[0] == "--workdir" for argument in argv)
            # Silent without a run, as other programs before `head`.
            return fail(CLOSED_OUTPUT, errors.FAILED) if is_training else errors.FAILED
        if reason := errors.too_long(error, argv):
            return fail(reason)
        if not disk_error(error):
            raise
        return fail(f"{error.filename or 'the disk'}: {error.strerror}; {INTACT}")
    except (MemoryError, RuntimeError) as error:  # JAX raises a RuntimeError
        reason = memory_error(error)
        if reason is None:
            raise
        smaller = "lower config.batch_size or config.data.max_length, raise config.optimizer.accumulation_steps, "
        smaller += "or choose a smaller config.model"
        return fail(f"out of memory ({reason}); {smaller}; {INTACT}")


def _main(argv: list[str]) -> int:
    arguments, overrides = command_line.split_overrides(argv[2:] if argv[1:2] == ["train"] else argv[1:])
    arguments = ["--help=" if argument in ("-h", "--help") else argument for argument in arguments]
    values = _flags()
    try:
        rest = values([argv[0], *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        known = [f"--{name}" for name in (*FLAGS, "config", "workdir", "stopped_exit_code", "print_config")]
        raise command_line.unknown(f"--{error.flagname}", known, OVERRIDE) from error
    except flags.IllegalFlagValueError as error:  # "flag --NAME=VALUE: reason"
        name, _, value = str(error).removeprefix("flag --").partition(":")[0].partition("=")
        kind = {"int": "an integer", "bool": "true or false"}[values[name].flag_type()]
        raise UserError(f"--{name} is {value!r}; it must be {kind}") from error
    except flags.Error as error:  # "Missing value for flag --NAME"
        raise command_line.no_value(f"--{str(error).rpartition('--')[2]}") from error
    if values.help is not None:
        print(config_help.describe_keys(values.help) if values.help else _help())
        return 0
    if rest:
        raise command_line.unknown(rest[0], (), OVERRIDE)
    for name in ("config",) if values.print_config else ("config", "workdir"):
        if not values[name].value:
            raise command_line.missing(f"--{name}", command_line.EXAMPLE)
    stopped = values.stopped_exit_code
    if errors.is_failure(stopped):
        codes = f"{errors.STOPPED_CODES[0]} to {errors.STOPPED_CODES[-1]}"
        raise UserError(f"--stopped_exit_code is {stopped}; it must be 0, or {codes}, because other codes are reserved")
    # The state of a survivor is in memory only: signals wait until the training can save it.
    unblocks = find_survivor() is None
    with Ending(1, stopped, lambda: _stopped(argv, early=not Interrupt.was_entered), unblocks=unblocks):
        config = configs.load_config(values.config)
        given = configs.override(config, overrides)
        if values.print_config:
            print(config_help.format_flags(config))
            return 0
        return _train(config, given, values, argv)


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "Config file, optionally followed by :PRESET.", flag_values=values)
    flags.DEFINE_string("workdir", None, "Directory of the run. An existing run is resumed.", flag_values=values)
    flags.DEFINE_integer("stopped_exit_code", 0, "Exit code of a run stopped by a signal.", flag_values=values)
    for name, flag in FLAGS.items():
        define = flags.DEFINE_integer if flag.kind is int else flags.DEFINE_string
        define(name, None, flag.help, flag_values=values)
    flags.DEFINE_bool("print_config", False, "Print the config and exit.", flag_values=values)
    flags.DEFINE_string("help", None, "Show this help, or that of a section of keys.", flag_values=values)
    return values


def _help() -> str:
    files = ", ".join(f"configs/{file.name}" for file in sorted(configs.config_folder().glob("*.py")))
    keys = "Sections of keys (--help=SECTION prints the keys of one, with their defaults and meaning):"
    text = config_help.wrapped_text(f"{__doc__}\nConfigs: {files}\n\n{keys}\n")
    return f"{text}\n{config_help.describe_overview()}"


def _train(config: ConfigDict, given: set[str], values: flags.FlagValues, argv: list[str]) -> int:
    # Imported late, because JAX must be configured before it is used and --help does not need it.
    from jaxpar import data, strategies, tasks, training
    from jaxpar.core import mesh
    from jaxpar.launch import processes
    from jaxpar.launch.elastic import Survival
    from jaxpar.run.build import next_steps

    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    strategies.check_elastic(config)
    workdir, found = Path(values.workdir), find_place({name: values[name].value for name in FLAGS})
    if mesh.sends_between_cpus(config):
        processes.listen_for_arrays(found, config.mesh.virtual_cpu_devices)
    processes.meet_processes(found, config.elastic_seconds)
    try:
        with Survival(found, config.elastic_seconds) as survival:
            try:
                result = training.train_config(config, workdir, Interrupt(), given=given, survival=survival)
            except Stopped as stopped:
                print(printable(f"{stopped}\nresume    {resume_command(argv)}", keep="\n"), flush=True)
                return int(values.stopped_exit_code)
    except StoppedEarly:
        print(_stopped(argv, early=True), flush=True)
        return int(values.stopped_exit_code)
    closing = _closing(result, workdir, tasks.find_task(config).headline, next_steps(config))
    print(printable(closing, keep="\n"), flush=True)
    return 0


def _stopped(argv: Sequence[str], *, early: bool) -> str:
    """Return the lines to print if a signal stopped the run outside the training loop, with nothing to save."""
    when = "before the first step" if early else "after the last step, before the result was written"
    return f"stopped {when}\nresume    {resume_command(argv)}"


def resume_command(argv: Sequence[str]) -> str:
    """Return the command line that starts the run again, from any folder of a shell."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {command_of(argv)}"


def _closing(result: Mapping[str, Any], workdir: Path, headline: str, steps: Sequence[str]) -> str:
    """Return the lines to print at the end of a run.

    headline: of the task. steps: what to do next.
    """
    reached = headline.format(**result) if "test_loss" in result else "finished"
    left = (
        "result.json",
        "report.html",
        "metrics.jsonl",
        "curves.png",
        "confusion.png",
        "checkpoints/",
        "tensorboard/",
        "profile/",
    )
    results = ", ".join(name for name in left if (workdir / name).exists())
    rate = f", {result['examples_per_second']:,.0f} examples/s" if "examples_per_second" in result else ""
    separator = ";\n          "
    return (
        f"\n{reached} after {format_count(result['steps'], 'step')}{rate}\n"
        f"results   {workdir}/{results}\n"
        f"next      {separator.join(steps)}"
    )
