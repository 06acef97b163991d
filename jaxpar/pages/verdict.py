"""Reads the verdict of the certificate in a workdir, which is that of a run with the same settings."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import files
from jaxpar.choose.planner import AUTO_STRATEGY
from jaxpar.errors import UserError, format_count
from jaxpar.run import resume

CERTIFICATE = "certificate.json"
SECTION_READERS = {  # strategies that read a section of the config; all strategies read the other sections
    "asynchronous": ("async_data_parallel",),
    "pipeline": ("pipeline", "swarm", AUTO_STRATEGY),
    "swarm": ("swarm",),
}


def different_settings(before: configs.Values, config: ConfigDict) -> dict[str, str]:
    """Return `resume.differences` without the sections that the strategy of the config does not read."""
    ignored = [section for section, readers in SECTION_READERS.items() if config.strategy not in readers]
    changed = resume.differences(before, config)
    return {key: text for key, text in changed.items() if key.partition(".")[0] not in ignored}


def read_verdict(path: Path, config: ConfigDict) -> str:
    """Return the verdict of a certificate; empty if there is none. Raises UserError if the file is damaged.

    It is that of a run with the same settings, except for its length.
    """
    if not path.is_file():
        return ""
    try:
        certified = files.parse_json(path.read_text())
        outside, steps = certified["outside"], len(certified["batches"])
        others = different_settings(certified["config"], config).keys() - {"num_steps"}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: it is not a certificate ({error!r}); delete it") from error
    if others:
        return "of other settings"
    if outside:
        return f"failed: {format_count(len(outside), 'error')} outside the tolerance"
    return f"passed, {format_count(steps, 'step')}" if certified["tolerance"] else "no tolerance applies"
