"""The command line flags that `jaxpar simulate` and `jaxpar draw` share: the schedule and its action times."""

import argparse
import sys
from pathlib import Path

from jaxpar.choose.search.lockstep_search import lockstep_bound, search_lockstep
from jaxpar.choose.search.search import SearchResult, search
from jaxpar.command_line import Parser, integer, missing, number, output_path, writing
from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.tables import periodic, simulate
from jaxpar.strategies.pipeline.tables import schedule as schedules
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, WITH_REPLICAS, parse_replicas, replicated_table
from jaxpar.strategies.pipeline.tables.simulate import LARGEST_VALUE, Simulation, Times
from jaxpar.strategies.pipeline.tables.table import Table
from jaxpar.strategies.pipeline.tables.table_file import is_table_file, read_table, write_table

SEARCH_SECONDS, TABLE_SECONDS = 0.01, 4e-5  # approximate times of a search and of a table per stage and microbatch
QUIET_SECONDS = 5.0  # what takes longer is announced

OBJECTIVES = ("cost", "lockstep")

_time = number(f"a time between 0 and {LARGEST_VALUE:g}", maximum=LARGEST_VALUE)


def schedule_parser(description: str | None, prog: str, several: str = "") -> Parser:
    """Make a parser for the flags of a schedule and its action times. several: the help for more than one schedule."""
    result = Parser(description, prog)
    add, number_of = result.add_argument, integer(1)
    add("--schedule", help=f"one of {', '.join((*SCHEDULES, *CONTINUOUS))}, or the path of a CSV table{several}")
    add("--num_stages", type=number_of, metavar="P", help="number of devices")
    add("--replicas", type=_replicas, help="number of devices of each stage, such as 2,1, instead of --num_stages")
    add("--num_microbatches", type=number_of, metavar="M", help="number of microbatches")
    per_batch = "for a schedule without flush: number of microbatches of a batch (default: the fewest possible)"
    add("--microbatches_per_batch", type=number_of, metavar="M", help=per_batch)
    chunks = "stages per device (default: the number that the schedule defines)"
    add("--num_chunks", type=number_of, metavar="V", help=chunks)
    for kind, action in (("forward", "F"), ("backward", "B, without W,"), ("weight", "W")):
        times = f"time of {action} for one microbatch on one device, or one time per device: 1,1.5,1 (default: 1)"
        add(f"--{kind}", type=_times, default="1", help=times)
    add("--communication", type=_time, default="0", help="time to send a result to another device (default: 0)")
    add("--auto", action="store_true", help="search for a fast schedule within --memory_limit")
    add("--objective", choices=OBJECTIVES, help="with --auto: the metric to minimize (default: cost)")
    limit = "with --auto: maximum number of microbatches on a device between F and W (default: --num_stages)"
    add("--memory_limit", type=number("a non-negative number"), help=limit)
    share = "with --auto: fraction of a microbatch's memory that is held between B and W, from 0 to 1 (default: 1)"
    add("--weight_memory", type=number("a number between 0 and 1", maximum=1), help=share)
    add("--save", type=output_path, metavar="FILE.csv", help="write the table to this file")
    return result


def find_schedule(arguments: argparse.Namespace) -> tuple[SearchResult, Simulation]:
    """Return the schedule that the flags select and its simulation. Write the table to --save if that is set."""
    times, communication = _flagged_times(arguments), arguments.communication
    try:
        result = _auto(arguments, times, communication) if arguments.auto else _named(arguments)
        _check_devices(times, result.table.num_devices)
        simulation = simulate.simulate_table(result.table, times, communication)
        if arguments.save:
            with writing("--save", arguments.save):
                write_table(result.table, arguments.save)
    except ValueError as error:  # often begins with the name of an argument, which here is a flag
        name, space, rest = str(error).partition(" ")
        flag = "num_stages" if name == "num_devices" else name
        if flag == "num_stages" and arguments.replicas:
            listed = ",".join(map(str, arguments.replicas))
            of = "devices" if sum(arguments.replicas) > schedules.MAX_TABLE_SIZE else "stages"
            number, _, rule = rest.partition("; it must ")
            raise UserError(f"--replicas is {listed}, whose number of {of} {number}; it must {rule}") from error
        raise UserError(f"--{flag}{space}{rest}" if flag in vars(arguments) else str(error)) from error
    return result, simulation


def steady_bubble(arguments: argparse.Namespace) -> float:
    """Return the bubble rate of a schedule without flush once the pipeline is full. The flags must be valid."""
    table = periodic.periodic_table(
        arguments.schedule, _devices_of_stages(arguments), _microbatches_per_batch(arguments)
    )
    return float(simulate.steady_bubble_rate(table, _flagged_times(arguments), arguments.communication))


def flagged_bound(arguments: argparse.Namespace, table: Table) -> float:
    """Return the lower bound in lockstep for all tables with the stages of the table that --auto found."""
    limit, weight_memory = _limits(arguments)
    m = table.num_microbatches
    return lockstep_bound(_flagged_times(arguments), arguments.communication, limit, m, table.stages, weight_memory)


def _flagged_times(arguments: argparse.Namespace) -> Times:
    return Times(*(getattr(arguments, kind) for kind in Times._fields))


def _named(arguments: argparse.Namespace) -> SearchResult:
    """Return the table of --schedule."""
    name = arguments.schedule
    if name is None:
        raise UserError("--schedule is missing; it must be a schedule or the path of a CSV table, unless --auto is set")
    if "," in name and not Path(name).exists():
        raise UserError(f"--schedule is {name!r}; it must be one schedule or table, except for `jaxpar draw`")
    for flag in ("objective", "memory_limit", "weight_memory"):
        if (value := getattr(arguments, flag)) is not None:
            shown = f"{value:g}" if isinstance(value, float) else repr(value)
            raise UserError(f"--{flag} is {shown}; it must not be set without --auto")
    _check_sizes(arguments, f"--schedule={name}")
    table = _table_of_file(arguments) if is_table_file(name) else _table_by_name(arguments)
    return SearchResult(Path(name).name, table)


def _table_of_file(arguments: argparse.Namespace) -> Table:
    name = arguments.schedule
    try:
        table = read_table(name)
    except ValueError as error:
        raise UserError(f"--schedule is {error}") from error
    for flag, of_table in zip(("num_stages", "num_chunks", "num_microbatches"), table[:3], strict=True):
        if getattr(arguments, flag) not in (None, of_table):
            raise UserError(f"--{flag} is {getattr(arguments, flag)}; it must be {of_table}, as in {name}")
    return table


def _table_by_name(arguments: argparse.Namespace) -> Table:
    name = arguments.schedule
    if name not in {*SCHEDULES, *CONTINUOUS}:
        raise ValueError(schedules.unknown_schedule("schedule", name))
    num_devices = sum(arguments.replicas) if arguments.replicas else _required(arguments, "num_stages")
    m = _required(arguments, "num_microbatches")
    v = arguments.num_chunks or (SCHEDULES[name].num_chunks if name in SCHEDULES else 1)
    if reason := schedules.size_obstacle(num_devices, m, v):
        raise ValueError(reason)
    _announce("making and simulating the table", TABLE_SECONDS * num_devices * v * m)
    replicas = _devices_of_stages(arguments)
    if arguments.save and (name in CONTINUOUS or max(replicas) > 1):
        raise UserError(
            f"--save is '{arguments.save}'; it must not be set with --schedule={name}"
            f"{'' if name in CONTINUOUS else ' and --replicas'}, because a run cannot read this table; a run makes it "
            f"with config.pipeline.schedule={name!r}"
        )
    if name in CONTINUOUS:
        per_batch = _microbatches_per_batch(arguments)
        if reason := periodic.continuous_obstacle(name, replicas, num_microbatches=per_batch, num_chunks=v):
            raise ValueError(reason.replace("num_microbatches", "microbatches_per_batch"))
        return schedules.unrolled_table(name, replicas, per_batch, m)
    if max(replicas) == 1:
        return schedules.make_table(name, num_devices=len(replicas), num_microbatches=m, num_chunks=v)
    if reason := schedules.schedule_obstacle(name, num_devices=num_devices, num_microbatches=m, num_chunks=v):
        raise ValueError(reason)
    return replicated_table(name, replicas, m)


def _microbatches_per_batch(arguments: argparse.Namespace) -> int:
    number: int | None = arguments.microbatches_per_batch
    return number or periodic.fewest_microbatches(arguments.schedule, _devices_of_stages(arguments))


def _devices_of_stages(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the number of devices of each stage."""
    if not arguments.replicas:
        return (1,) * _required(arguments, "num_stages")
    if arguments.num_stages is not None:
        raise UserError(f"--num_stages is {arguments.num_stages}; it must not be set with --replicas")
    replicas: tuple[int, ...] = arguments.replicas
    return replicas


def _check_sizes(arguments: argparse.Namespace, given: str) -> None:
    """Raise UserError for sizes that only some schedules have, and not what is given: --schedule=NAME or --auto."""
    replicas = arguments.replicas and ",".join(map(str, arguments.replicas))
    for flag, value, allowed in (
        ("replicas", replicas, (*WITH_REPLICAS, *CONTINUOUS)),
        ("microbatches_per_batch", arguments.microbatches_per_batch, tuple(CONTINUOUS)),
    ):
        if value and arguments.schedule not in allowed:
            others = ", ".join(allowed)
            raise UserError(f"--{flag} is {value}; it must not be set with {given}, only with one of {others}")


def _auto(arguments: argparse.Namespace, times: Times, communication: float) -> SearchResult:
    """Return the best table that a search finds, with one or two chunks unless --num_chunks is set."""
    if arguments.schedule is not None:
        raise UserError(
            f"--schedule is {arguments.schedule!r}; it must not be set with --auto, which searches for a schedule"
        )
    _check_sizes(arguments, "--auto")
    num_stages, num_microbatches = _required(arguments, "num_stages"), _required(arguments, "num_microbatches")
    _check_devices(times, num_stages)
    limit, weight_memory = _limits(arguments)
    is_lockstep = arguments.objective == "lockstep"
    searches = search_lockstep if is_lockstep else search
    numbers_of_chunks = (1, 2) if arguments.num_chunks is None else (arguments.num_chunks,)
    for num_chunks in numbers_of_chunks:
        if reason := schedules.size_obstacle(num_stages, num_microbatches, num_chunks):
            raise ValueError(reason)
    _announce("searching", SEARCH_SECONDS * num_stages * num_microbatches)
    candidates: list[tuple[float, int, SearchResult]] = []
    for num_chunks in numbers_of_chunks:
        sizes = (num_stages, num_microbatches, num_chunks)
        try:
            result = searches(times, communication, limit, *sizes, weight_memory=weight_memory)
        except ValueError:
            if not candidates and num_chunks == numbers_of_chunks[-1]:
                raise
            continue
        simulation = simulate.simulate_table(result.table, times, communication)
        candidates.append((simulation.lockstep if is_lockstep else simulation.cost, num_chunks, result))
    return min(candidates)[-1]


def _announce(work: str, seconds: float) -> None:
    """Print what takes long, on stderr."""
    if seconds > QUIET_SECONDS:
        print(f"{work} for about {seconds:.0f} s", file=sys.stderr, flush=True)


def _limits(arguments: argparse.Namespace) -> tuple[float, float]:
    """Return --memory_limit and --weight_memory, or their defaults."""
    limit: float = arguments.num_stages if arguments.memory_limit is None else arguments.memory_limit
    weight_memory: float = 1.0 if arguments.weight_memory is None else arguments.weight_memory
    return limit, weight_memory


def _required(arguments: argparse.Namespace, flag: str) -> int:
    value: int | None = getattr(arguments, flag)
    if value is None:
        raise missing(f"--{flag}", f"--{flag}=4")
    return value


def _check_devices(times: Times, num_devices: int) -> None:
    for flag, of_devices in times._asdict().items():
        if isinstance(of_devices, list) and len(of_devices) != num_devices:
            number = len(of_devices)
            raise UserError(f"--{flag} has {number} times; it must have one, or one per device ({num_devices})")


def _replicas(text: str) -> tuple[int, ...]:
    replicas = parse_replicas(text)
    if replicas is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must list the number of devices of each stage, separated by commas, such as 2,1,1, and each "
            "must be less than 1,000,000,000"
        )
    return replicas


def _times(text: str) -> float | list[float]:
    try:
        values = [_time(time) for time in text.split(",")]
    except argparse.ArgumentTypeError:
        one_or_each = f"a time between 0 and {LARGEST_VALUE:g}, or one time per device, such as 1,1.5,1"
        raise argparse.ArgumentTypeError(f"{text!r}; it must be {one_or_each}") from None
    return values if len(values) > 1 else values[0]
