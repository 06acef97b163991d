r"""Certifies a strategy: runs it and a single-device reference on the same batches, and reports the differences.

    jaxpar certify --config=configs/quickstart.py [--num_steps=10] [--output=certificate.json] \
        [--config.KEY=VALUE ...]

For each layer, reports the error of the initial parameters, the largest errors over all steps of the gradient and of
the optimizer update, the error of a resumed state, and the difference of the parameters after two independent runs.
A pipeline that never drains is compared with one device that delays its updates as the pipeline does.
docs/certificate.md explains what is compared and why.

Exit codes: 0 if the differences are within the tolerance, or if there is no tolerance because the strategy computes
different numbers by design; 1 if they are outside the tolerance, or if the training failed; 2 for invalid arguments.
"""

from collections.abc import Sequence

from jaxpar import files
from jaxpar.command_line import check_folder, integer, output_path
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.errors import UserError
from jaxpar.inspect.certificate import MOST_STEPS
from jaxpar.inspect.certificate_report import certify, format_certificate


def main(argv: Sequence[str]) -> int:
    parser = ConfigParser(__doc__, "jaxpar certify")
    steps = f"number of steps, up to {MOST_STEPS}; the learning rate schedule spans them"
    passes = "number of microbatches into which the reference divides a batch"
    parser.add_argument("--num_steps", type=integer(1, MOST_STEPS), default=10, help=steps)
    parser.add_argument("--reference_passes", type=integer(1), default=1, help=passes)
    parser.add_argument("--output", type=output_path, default="certificate.json", help="JSON file to write")
    arguments, config = parser.read(argv)
    output = arguments.output
    if output.is_dir():
        raise UserError(f"--output is '{output}', which is a directory; it must be a file")
    check_folder("--output", output)
    certified = certify(config, arguments.num_steps, arguments.reference_passes)
    files.write_text(output, files.json_text(certified, indent=1) + "\n")
    print(f"{format_certificate(certified)}\nwritten    {output}")
    return 1 if certified["outside"] else 0
