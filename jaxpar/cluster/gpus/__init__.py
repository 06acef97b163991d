"""The kinds of GPUs that jaxpar knows: one TOML file each, with its source. Another file of this form can be named.

A file has `device_kind`, as JAX reports it; `memory_bytes`, of the data sheet; `compute_capability`; a table `xla`
with the numbers that XLA needs to compile for the GPU; and, if known, a table `links` with the bytes/s that a GPU can
send to others of its host and over the network, and a table `peak_flops` by dtype, in FLOP/s, which replaces the peaks
of jaxpar/measure/flops.py.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import UserError, nearest
from jaxpar.files import open_text, path_error

# Fields of XLA's gpu_device_info that are equal for all of these GPUs.
COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
DIFFERENT = (
    *("shared_memory_per_core", "threads_per_core_limit", "core_count", "fpus_per_core", "memory_bandwidth"),
    *("l2_cache_size", "clock_rate_ghz", "device_memory_size", "shared_memory_per_block_optin"),
)
KEYS = ("device_kind", "memory_bytes", "compute_capability", "xla", "links", "peak_flops", "source")
LINKS = ("host", "network")  # to the other GPUs of the host, and to those of other hosts
PEAK_DTYPES = ("float32", "bfloat16")  # whose peaks predictions need; that of float16 is the same unless it is known
CUDA, CUDNN = (12, 9), (9, 10)  # versions for which XLA compiles
CAPABILITIES = (  # those that this CUDA compiles for
    *("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"),
    *("10.0", "10.1", "10.3", "12.0", "12.1"),
)


@dataclass(frozen=True)
class GpuKind:
    """A kind of GPU."""

    device_kind: str  # the name that JAX reports
    memory_bytes: float  # memory according to the data sheet
    compute_capability: str  # such as 9.0
    numbers: Mapping[str, float]  # values of COMMON and DIFFERENT, by name
    links: Mapping[str, float]  # the rates of LINKS, in bytes/s, by name; empty if unknown
    # the peak FLOP/s by dtype that the file states; the others are those of jaxpar/measure/flops.py
    peak_flops: Mapping[str, float]

    @property
    def memory_bandwidth(self) -> float:
        """The rate at which the GPU reads its memory, in bytes/s."""
        return self.numbers["memory_bandwidth"]

    def config(self, memory_bytes: float) -> str:
        """Return XLA's description of the GPU with this memory: the text form of a GpuTargetConfigProto."""
        major, minor = self.compute_capability.split(".")
        numbers = {**self.numbers, "device_memory_size": int(memory_bytes)}
        lines = [f"{name}: {value}" for name, value in numbers.items()]
        lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
        versions = (("dnn_version_info", CUDNN), ("runtime_version", CUDA))
        rest = [f"{name} {{ major: {major} minor: {minor} }}" for name, (major, minor) in versions]
        info = "gpu_device_info {\n" + "\n".join(lines) + "\n}"
        return "\n".join([info, 'platform_name: "CUDA"', *rest, f'device_description_str: "{self.device_kind}"\n'])


@functools.cache
def gpu_kinds() -> dict[str, GpuKind]:
    """Return the known kinds by name, such as h100."""
    return {path.stem: read_gpu(path) for path in sorted(Path(__file__).parent.glob("*.toml"))}


def name_of_kind(device_kind: str) -> str | None:
    """Return the name of the known kind that JAX reports like this, or None."""
    return next((name for name, gpu in gpu_kinds().items() if gpu.device_kind == device_kind), None)


def find_gpu(name: str, key: str = "device kind", others: Sequence[str] = ()) -> GpuKind:
    """Return the kind with this name in lower or upper case, or that of a TOML file with this path.

    Raises UserError, which begins with `key`, if there is none, or the file is invalid. others: other values that the
    key can have, for messages.
    """
    kinds = gpu_kinds()
    if name.lower() in kinds:
        return kinds[name.lower()]
    if name.endswith(".toml") or (name and Path(name).is_dir()):
        return read_gpu(Path(name), key)
    known = [*kinds, *others]
    words = re.split(r"[^a-z0-9]+|(?<=\d)x", name.lower())  # of v100-16gb, 8xv100, dgx-a100
    likely = [kind for kind in kinds if any(f"{kind}-".startswith(f"{word}-") for word in words)]
    hint = f" Did you mean {' or '.join(map(repr, likely))}?" if likely else nearest(name.lower(), known)
    raise UserError(
        f"{key} is {name!r}; it must be one of {', '.join(known)}, or the path of a TOML file{hint and '.' + hint}"
    )


def kind_of_device(device_kind: str) -> GpuKind | None:
    """Return the known kind of GPUs that JAX reports by this name; None if there is none."""
    return next((gpu for gpu in gpu_kinds().values() if gpu.device_kind == device_kind), None)


def read_toml(path: Path, key: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises UserError, which begins with `key`."""
    try:
        with open_text(path) as file:
            return tomllib.loads(file.read())
    except OSError as error:
        raise UserError(f"{key} is {str(path)!r}, {path_error(error)}; it must be the path of a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key} is {str(path)!r}, which is not TOML ({error}); it must be a TOML file") from None


def read_gpu(path: Path, key: str = "device kind") -> GpuKind:
    """Read the file of a kind. Raises UserError, which begins with `key`."""
    content = read_toml(path, key)
    if "gpu" in content:
        raise UserError(
            f"{key} is {str(path)!r}, which describes a cluster; it must be the file of a kind of GPU, or a cluster "
            "file without a number of GPUs behind it"
        )
    links, numbers = content.get("links", {}), content.get("xla")
    for prefix, table, keys in (("", content, KEYS), ("xla.", numbers, DIFFERENT), ("links.", links, LINKS)):
        for name in table if isinstance(table, dict) else ():
            if name not in keys:
                raise UserError(
                    f"{path}: {prefix}{name} is not a key; it must be one of {', '.join(keys)}.{nearest(name, keys)}"
                )
    if not isinstance(numbers, dict):
        raise UserError(f"{path} has no table xla; it must have one with {', '.join(DIFFERENT)}")
    values = {f"xla.{name}": numbers.get(name) for name in DIFFERENT} | {"memory_bytes": content.get("memory_bytes")}
    if not isinstance(links, dict):
        raise UserError(f"{path}: links is {links!r}; it must be a table with {' and '.join(LINKS)}")
    if links:
        values |= {f"links.{name}": links.get(name) for name in LINKS}
    for name, value in values.items():
        check_positive(value, f"{path}: {name}")
    kind, capability = content.get("device_kind"), str(content.get("compute_capability", ""))
    if not isinstance(kind, str) or not re.fullmatch(r'[^"\\\x00-\x1f]+', kind):
        raise UserError(f"{path}: device_kind is {kind!r}; it must be a name")
    if capability not in CAPABILITIES:
        state = repr(capability) if "compute_capability" in content else "missing"
        raise UserError(f"{path}: compute_capability is {state}; it must be one of {', '.join(CAPABILITIES)}")
    known = COMMON | {name: numbers[name] for name in DIFFERENT}
    return GpuKind(kind, content["memory_bytes"], capability, known, links, read_peaks(content, str(path)))


def check_positive(value: object, key: str) -> None:
    """Raise UserError, which begins with `key`, unless this value of a file is a number greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
        raise UserError(f"{key} is {value!r}; it must be a number greater than 0")


def read_peaks(content: Mapping[str, Any], path: str) -> dict[str, float]:
    """Return the table peak_flops of a file, by dtype; it may be missing. Raises UserError if it is invalid."""
    peaks = content.get("peak_flops", {})
    if not isinstance(peaks, dict) or not set(peaks) <= {*PEAK_DTYPES, "float16"}:
        names = ", ".join(PEAK_DTYPES)
        raise UserError(f"{path}: peak_flops is {peaks!r}; it must be a table with some of {names} and float16")
    found = {dtype: read_number(peaks, dtype, f"{path}: peak_flops") for dtype in peaks}
    return {"float16": found["bfloat16"], **found} if "bfloat16" in found else found


def read_number(content: Mapping[str, Any], name: str, path: str, *, integer: bool = False, least: float = 1) -> float:
    """Return the number `name` of a file or table. Raises UserError, which begins with `path`, if it is invalid."""
    value = content.get(name)
    kinds = int if integer else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 2**63:
        state = repr(value) if name in content else "missing"
        what = "an integer" if integer else "a number"
        raise UserError(f"{path}: {name} is {state}; it must be {what} of at least {least}")
    return value
