r"""Finds the largest batch that fits on GPUs, which this machine need not have, by compiling the step for them.

    jaxpar fit --config=configs/quickstart.py --target=h100:8 [--vary=microbatch] \
        [--remat=none,full] [--json]

The memory is that of XLA's buffer assignment, and must fit into what JAX takes on a GPU: 0.75 of the memory, or
XLA_CLIENT_MEM_FRACTION. The search of a remat (full, none, dots) compiles the step about six times.

--vary=batch varies config.batch_size, up to the number of training examples. --vary=microbatch keeps it and varies the
number of microbatches: config.pipeline.num_microbatches, or config.optimizer.accumulation_steps without a pipeline.

The exit code is 1 if no size fits with any remat, and 2 for invalid arguments.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar import models
from jaxpar.choose.auto import choose
from jaxpar.choose.planner import AUTO_STRATEGY
from jaxpar.choose.stages import until_chosen
from jaxpar.cluster.target import Target, find_target, what_jax_takes
from jaxpar.command_line import choice, names
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.errors import format_bytes
from jaxpar.inspect import fit
from jaxpar.inspect.fit import Fit, Sizes, Tried
from jaxpar.run import build
from jaxpar.strategies.pipeline.executor.stage_programs import REMATS


def main(argv: Sequence[str]) -> int:
    parser = ConfigParser(__doc__, "jaxpar fit")
    parser.require("--target", "--target=h100:8", help="the GPUs, such as h100:8, h100:16x8 (hosts x GPUs) or here")
    add, vary = parser.add_argument, (fit.BATCH, fit.MICROBATCH)
    add("--vary", type=choice(vary), default=fit.BATCH, help="what to vary: batch or microbatch")
    add("--remat", type=names(REMATS), default=list(REMATS), help="some of full,none,dots; default: all")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    arguments, config = parser.read(argv)
    target = find_target(arguments.target)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        if config.strategy == AUTO_STRATEGY:
            config, _ = choose(config, Path(folder), target)
        fit.check_strategy(config)
        model, sizes, fits = _run(config, Path(folder), target, arguments.vary, arguments.remat)
    if arguments.json:
        print(json.dumps({"model": model, **_as_json(config, target, sizes, fits)}, indent=1))
    else:
        print(model, *_as_text(config, target, sizes, fits), sep="\n")
    return 0 if any(one.largest for one in fits) else 1


def _run(config: Any, workdir: Path, target: Target, vary: str, remats: list[str]) -> tuple[str, Sizes, list[Fit]]:
    """Return a description of the model, the sizes, and the largest that fits for each remat. Prints the attempts."""
    # Each size gets a schedule of its own, if the config has none.
    stand_in = until_chosen(config, target.cluster, build.check_inputs(config, target.cluster))
    cluster, decision = build.check_run(stand_in, workdir, target.cluster)
    loaded = build.load_parts(stand_in, workdir, cluster)
    if vary == fit.BATCH:
        sizes = fit.batch_sizes(decision, len(loaded.dataset.train))
    else:
        sizes = fit.microbatch_sizes(config, decision, target)

    def report(remat: str, tried: Tried) -> None:
        print(f"remat {remat}, {vary} of {tried.size:,}: {_outcome(tried)}", file=sys.stderr, flush=True)

    info, problem = loaded.dataset.info, loaded.problem
    model = models.describe_model(config, problem.model, problem.batch)
    return model, sizes, list(fit.find_fits(config, problem, info, target, sizes, remats, report))


def _outcome(tried: Tried) -> str:
    return tried.reason or f"needs {exact(tried.needed_bytes)}"


def exact(nbytes: float) -> str:
    """Format bytes with four digits: the sizes next to the limit differ by less than a percent of it."""
    return format_bytes(nbytes, digits=4)


def _as_json(config: Any, target: Target, sizes: Sizes, fits: list[Fit]) -> dict[str, Any]:
    def row(tried: Tried | None) -> dict[str, Any] | None:
        if tried is None:
            return None
        finite = None if tried.reason else tried.needed_bytes
        value = sizes.values[tried.size]
        return {"size": tried.size, sizes.key: value, "needed": finite, "reason": tried.reason}

    remat = fit.remat_key(config)
    return {
        "usable_bytes": target.usable_bytes,
        "memory_bytes": target.memory_bytes,
        "fits": [{remat: one.remat, "largest": row(one.largest), "following": row(one.following)} for one in fits],
    }


def _as_text(config: Any, target: Target, sizes: Sizes, fits: list[Fit]) -> list[str]:
    """Return the result as the lines of a table."""
    what, all_of = ("batch_size", "training set") if sizes.key == "batch_size" else ("microbatch", "batch")
    lines = [what_jax_takes(target.usable_bytes, digits=4), ""]
    lines.append(f"{fit.remat_key(config):14} {'largest ' + what:>18} {'needs':>9}  next")
    for one in fits:
        size, needed = (f"{one.largest.size:,}", exact(one.largest.needed_bytes)) if one.largest else ("none", "")
        following = f"the {all_of} has no more examples"
        if one.following is not None:
            following = f"{one.following.size:,} {_outcome(one.following)}"
        lines.append(f"{one.remat:14} {size:>18} {needed:>9}  {following}")
    if what == "microbatch":
        found = [(one.remat, sizes.values[one.largest.size]) for one in fits if one.largest]
        lines += ["", *(f"config.{sizes.key}={value} with remat {remat}" for remat, value in found)]
    return lines
