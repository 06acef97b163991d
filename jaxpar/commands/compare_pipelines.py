"""Compares pipeline schedules and data parallelism by the time to a target accuracy, in virtual time on a cluster.

    jaxpar compare pipelines --config=configs/quickstart.py [--workdir=runs/pipelines] [--stages=2]
        [--num_microbatches=8] [--target=0.7] [--cases=1f1b,pipedream,..] [--device=v100] [--bandwidth=1.5e11]
        [--latency=5e-6] [--config.KEY=VALUE ...]

Each case is a run of `jaxpar train`, with the same batches and seed; a run that is already in the workdir is not
repeated. The settings of a case override those of the config and the command line. The virtual time of a run is its
number of steps times the time that `jaxpar plan` predicts for a step on the cluster, which does not depend on this
machine. A schedule without flush takes the time of a step in its steady state.

The accuracy against steps and against virtual time is drawn as WORKDIR/pipelines.png. A table is printed, and written
as WORKDIR/pipelines.md:

  bubble       fraction of a step in which the busiest device waits, or only communicates
  time to      virtual time of the first evaluation (config.eval.every_steps) at or above the target
  memory       of the device that needs the most, also as predicted by `jaxpar plan`
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxpar import cluster as clusters
from jaxpar.cluster import Link
from jaxpar.cluster.gpus import gpu_kinds
from jaxpar.command_line import choice, integer, number, output_path
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.compare.pipelines import PIPELINE_CASES, compare_pipelines
from jaxpar.core.mesh import STAGE
from jaxpar.strategies.pipeline.tables.simulate import LARGEST_VALUE


def main(argv: Sequence[str]) -> None:
    parser = ConfigParser(__doc__, "jaxpar compare pipelines")
    add, kinds = parser.add_argument, gpu_kinds()
    add("--workdir", type=output_path, default="runs/pipelines", help="directory of the runs")
    add("--stages", type=integer(2), default=2, help="number of devices: stages, or replicas of ddp")
    add("--num_microbatches", type=integer(1), default=8, help="number of microbatches of a batch")
    add("--target", type=number("a number between 0 and 1", maximum=1), default=0.7, help="accuracy to reach")
    parser.add_names("--cases", PIPELINE_CASES)
    add("--device", type=choice(kinds, ignore_case=True), default="v100", help=f"GPU: {', '.join(kinds)}")
    rate = number("at least 1 byte per second", minimum=1)
    add("--bandwidth", type=rate, default=1.5e11, help="of each link, in bytes per second")
    latency = number(f"a time between 0 and {LARGEST_VALUE:g}", maximum=LARGEST_VALUE)
    add("--latency", type=latency, default=5e-6, help="of each link, in seconds")
    arguments, overrides = parser.parse_with_overrides(argv)
    cluster = replace(
        clusters.named_cluster(
            arguments.device, arguments.stages, links={STAGE: Link(arguments.bandwidth, arguments.latency)}
        ),
        send_rates={"host": arguments.bandwidth},
        latencies={"host": arguments.latency},
        efficiencies={"host": 1.0},  # the bandwidth is what is reached
    )
    lines = compare_pipelines(
        arguments.config,
        overrides,
        arguments.workdir,
        cluster,
        num_microbatches=arguments.num_microbatches,
        target=arguments.target,
        cases=arguments.cases,
    )
    print("\n".join(["", *lines, "", f"picture   {arguments.workdir}/pipelines.png"]))
