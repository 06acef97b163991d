"""Reads the rates of eight H100s that this machine does not have from the programs that measure them.

    python -m tests.absent_rates

The programs are compiled for the GPUs, and take the time that is predicted for them at the assumed rates. Prints the
rates that are read from these times, as JSON.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.choose.costs import rates
from jaxpar.choose.costs.calibrate import AXIS
from jaxpar.choose.costs.measured_rates import MeasuredSizes, loops, single_programs, with_measured_rates
from jaxpar.cluster.target import find_target
from jaxpar.inspect.step_time import predict
from jaxpar.strategies.strategy import CompiledProgram

SIZES = MeasuredSizes(width=4096, many=2**22, sent=2**20)


def main() -> None:
    """Compile the programs, and print the rates."""
    target = find_target("h100:8")

    def seconds(function: Callable[..., Any], *arguments: Any) -> float:
        program = CompiledProgram(jax.jit(function).lower(*arguments).compile())
        return predict([program], target.cluster).seconds

    alone = jax.sharding.SingleDeviceSharding(target.devices[0])
    mesh, spec = Mesh(np.asarray(target.devices), (AXIS,)), PartitionSpec(AXIS)
    single = {
        name: seconds(function, *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone) for x in arguments))
        for name, (function, *arguments) in single_programs(SIZES).items()
    }
    looped: dict[Any, float] = {
        (kind, length): seconds(
            jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
            jax.ShapeDtypeStruct((8 * length,), np.float32, sharding=NamedSharding(mesh, spec)),
        )
        for kind, function in loops(8).items()
        for length in (SIZES.few, SIZES.sent)
    }

    found = with_measured_rates(target.cluster, {**single, **looped}, SIZES)
    print(
        json.dumps(
            {
                "efficiencies": dict(found.efficiencies),
                "launch_seconds": found.launch_seconds,
                "send_rate": rates.send_rate(found, "host"),
                "latency": found.latencies["host"],
            }
        )
    )


if __name__ == "__main__":
    main()
