"""Checks the paths of a workdir that a run writes, before it starts."""

from pathlib import Path

from jaxpar.errors import UserError

FOLDERS = ("checkpoints", "ledger", "tensorboard", "profile")
FILES = (
    *("config.json", "data.json", "tokenizer.json", "profile.json", "metrics.jsonl", "result.json"),
    *("updates.csv", "routing.csv", "scenario.json", "curves.png", "timeline.png", ".lock"),
)


def check_paths(workdir: Path) -> None:
    """Raise UserError for the first path of the workdir that exists, but is not what a run writes there."""
    for name in FOLDERS:
        _check(workdir, name, is_folder=True)
    for name in FILES:
        _check(workdir, name, is_folder=False)
        _check(workdir, f"{name}.tmp", is_folder=False)  # of a write that did not finish


def _check(workdir: Path, name: str, *, is_folder: bool) -> None:
    path = workdir / name
    if not path.exists():
        if is_folder and path.is_symlink():
            raise UserError(
                f"--workdir is {str(workdir)!r}, whose {name} is a link to {str(path.readlink())!r}, which does not "
                "exist; it must be a folder, or not exist"
            )
    elif path.is_dir() != is_folder:
        found, expected = ("file", "folder") if is_folder else ("folder", "file")
        raise UserError(
            f"--workdir is {str(workdir)!r}, whose {name} is a {found}; it must be a {expected}, or not exist"
        )
