"""Checks the paths of a workdir that a run writes, before it starts."""

from pathlib import Path

from jaxpar.errors import UserError
from jaxpar.files import FILES, FOLDERS, run_of


def check_paths(workdir: Path) -> None:
    """Raise UserError for the first path of the workdir that exists, but is not what a run writes there.

    Also if the workdir is in a folder that another run writes.
    """
    if (run := run_of(workdir)) not in (None, workdir.resolve()):
        raise UserError(f"--workdir is {str(workdir)!r}, which belongs to the run in {run}; it must be another folder")
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
    elif not (path.is_dir() if is_folder else path.is_file()):
        found = "file" if path.is_file() else "folder" if path.is_dir() else "device or pipe"
        expected = "folder" if is_folder else "file"
        raise UserError(
            f"--workdir is {str(workdir)!r}, whose {name} is a {found}; it must be a {expected}, or not exist"
        )
