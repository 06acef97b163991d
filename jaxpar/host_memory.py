"""Host memory: its size, and errors for what does not fit into it."""

import os
from pathlib import Path

from jaxpar.errors import UserError, format_bytes

# The memory limit of a container, in cgroups of version 2 and 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_bytes() -> int:
    """Return the bytes of memory that this process can use: the memory of the machine, or the limit of a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])


def check_host_memory(what: str, needed: int, purpose: str = "") -> None:
    """Raise UserError if `needed` bytes for a purpose do not fit. what: the keys that need them, with values."""
    available = host_bytes()
    if needed > available:
        use = f"host memory for {purpose}" if purpose else "host memory"
        raise UserError(
            f"{what}, which needs {format_bytes(needed)} of {use}; it must fit in {format_bytes(available)}, the "
            "memory of this machine"
        )


def memory_error(error: BaseException) -> str | None:
    """Return the reason, such as `Unable to allocate 12 TiB`, if memory ran out; None for all other errors."""
    text = str(error).partition("\n")[0].strip(". ")
    if isinstance(error, MemoryError):
        return text or "Unable to allocate memory"
    is_xla = text.startswith("RESOURCE_EXHAUSTED: ") and "alloc" in text
    return text.removeprefix("RESOURCE_EXHAUSTED: ") if is_xla else None
