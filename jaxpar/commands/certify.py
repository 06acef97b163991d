r"""Certifies a strategy: runs it and a single-device reference on the same batches, and reports the differences.

    jaxpar certify --config=configs/quickstart.py [--strategy=pipeline] [--num_steps=10] \
        [--output=certificate.json] [--report=certificate.html] [--config.KEY=VALUE ...]

For each layer, reports the error of the initial parameters, the largest errors over all steps of the gradient and of
the optimizer update, the error of a resumed state, and the difference of the parameters after two independent runs.
A pipeline that never drains is compared with one device that delays its updates as the pipeline does.
docs/explanation/certificates.md explains what is compared and why.

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
from jaxpar.use.pages.certificate_page import certificate_page


def main(argv: Sequence[str]) -> int:
    parser = ConfigParser(__doc__, "jaxpar certify")
    steps = f"number of steps, up to {MOST_STEPS}; the learning rate schedule spans them"
    passes = "number of microbatches into which the reference divides a batch"
    parser.add_argument("--strategy", help="the strategy to certify, short for --config.strategy")
    parser.add_argument("--num_steps", type=integer(1, MOST_STEPS), default=10, help=steps)
    parser.add_argument("--reference_passes", type=integer(1), default=1, help=passes)
    parser.add_argument("--output", type=output_path, default="certificate.json", help="JSON file to write")
    parser.add_argument("--report", type=output_path, help="HTML page to write, to show to others")
    arguments, config = parser.read(argv)
    written = {"--output": arguments.output, "--report": arguments.report}
    for flag, path in written.items():
        if path is not None and path.is_dir():
            raise UserError(f"{flag} is '{path}', which is a directory; it must be a file")
        if path is not None:
            check_folder(flag, path)
    if arguments.report == arguments.output:
        raise UserError(f"--report is '{arguments.report}', as --output is; it must be another file")
    certified = certify(config, arguments.num_steps, arguments.reference_passes)
    files.write_text(arguments.output, files.json_text(certified, indent=1) + "\n")
    if arguments.report is not None:
        files.write_text(arguments.report, certificate_page(certified))
    names = ", ".join(str(path) for path in written.values() if path is not None)
    print(f"{format_certificate(certified)}\nwritten    {names}")
    return 1 if certified["outside"] else 0
