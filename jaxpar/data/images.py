"""Reads MNIST and CIFAR-10 from the files as published (MNIST files plain or with .gz)."""

import hashlib
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxpar.data import cache, files
from jaxpar.data.examples import DataInfo, Dataset, SameSize
from jaxpar.errors import UserError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


Labelled = tuple[np.ndarray, np.ndarray]  # images [N, H, W, C], uint8, and their labels [N], int32


def load(config: ConfigDict) -> Dataset:
    """Load the data set in the directory config.data.train. The validation split is chosen by the hash of the image."""
    data = config.data
    directory = Path(data.train).expanduser()
    train, test, class_names = IMAGE_READERS[data.source](directory)
    shape, test_shape = (list(images_NHWC.shape[1:]) for images_NHWC, _ in (train, test))
    if shape != test_shape:
        raise UserError(
            f"{directory} has training images of shape {shape} and test images of shape {test_shape}; they must have "
            "the same shape"
        )
    digests_N = [hashlib.sha256(image.tobytes()).digest() for image in train[0]]
    place_N = np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests_N])
    is_validation_N = place_N < data.validation_fraction
    if data.validation_fraction > 0 and not 0 < is_validation_N.sum() < len(place_N):
        which = f"which selects {is_validation_N.sum()} of {len(place_N)} images"
        raise UserError(
            f"config.data.validation_fraction is {data.validation_fraction}, {which}; it must be 0, or leave images in "
            "both splits"
        )

    def split(images: Labelled, chosen_N: np.ndarray | slice, augment: bool) -> SameSize:
        images_NHWC, labels_N = images
        flip = augment and data.source == "cifar10"
        return SameSize(images_NHWC[chosen_N], labels_N[chosen_N], shift=augment, flip=flip)

    digests = [hashlib.sha256(array.tobytes()).hexdigest() for images in (train, test) for array in images]
    facts = {"source": data.source, "digests": digests}
    facts |= {"validation": float(data.validation_fraction), "augment": data.augment}
    info = DataInfo("image", train[0].shape[1:], len(class_names), class_names, 0, 0)
    validation = split(train, is_validation_N, False) if is_validation_N.any() else None
    trained, tested = split(train, ~is_validation_N, data.augment), split(test, slice(None), False)
    return Dataset(info, trained, validation, tested, cache.fingerprint(facts))


def _read_mnist(directory: Path) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Read Yann LeCun's idx files, named like train-images-idx3-ubyte or train-images.idx3-ubyte."""

    def read(name: str) -> Labelled:
        _, images_NHW = _read_idx(directory, f"{name}-images", 3)
        path, labels_N = _read_idx(directory, f"{name}-labels", 1)
        return _labelled(path, images_NHW[..., None], labels_N)

    return read("train"), read("t10k"), tuple(map(str, range(10)))


def _read_idx(directory: Path, stem: str, ndim: int) -> tuple[Path, np.ndarray]:
    """Read an idx file of uint8: bytes 0, 0, 8 (the code of uint8) and ndim, big-endian int32 sizes, then the data."""
    path = _one_of(directory, [f"{stem}{sep}idx{ndim}-ubyte{suffix}" for sep in "-." for suffix in ("", ".gz")])
    content = _content(path)
    if content[:4] != bytes((0, 0, 8, ndim)):
        magic = content[:4].hex()
        raise UserError(f"{path} starts with the magic number {magic}; an idx file of uint8 starts with 0000080{ndim}")
    start = 4 + 4 * ndim
    shape = np.frombuffer(content[4:start].ljust(4 * ndim, b"\0"), ">i4").tolist()
    expected = start + math.prod(shape)
    if min(shape) < 0 or len(content) != expected:
        why = f"but its header has sizes {shape}, which take {expected}; it is truncated or damaged"
        raise UserError(f"{path} has {len(content)} bytes, {why}")
    return path, np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_cifar10(directory: Path) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Read the python version (data_batch_1 ...) or the binary version (data_batch_1.bin ...)."""
    for inner, suffix, read in (
        ("cifar-10-batches-py", "", _read_pickled),
        ("cifar-10-batches-bin", ".bin", _read_records),
    ):
        for place in (directory, directory / inner):
            if (place / f"data_batch_1{suffix}").exists():
                batches = [read(_one_of(place, [f"data_batch_{number}{suffix}"])) for number in range(1, 6)]
                images, labels = map(np.concatenate, zip(*batches, strict=True))
                return (images, labels), read(_one_of(place, [f"test_batch{suffix}"])), CIFAR10_CLASSES
    names = "data_batch_1 (python version) or data_batch_1.bin (binary version)"
    raise UserError(f"config.data.train is {str(directory)!r}; it must be a directory that contains {names}")


def _read_records(path: Path) -> Labelled:
    """Read records of 1 + 3072 bytes: the label, then the 32x32 red, green and blue planes."""
    content = _content(path)
    if not content or len(content) % 3073:
        why = "but a CIFAR-10 file has 3073 bytes per image; it is truncated or damaged"
        raise UserError(f"{path} has {len(content)} bytes, {why}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return _labelled(path, records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0])


def _read_pickled(path: Path) -> Labelled:
    """Read a pickled dict with b'data' (uint8 [N,3072]) and b'labels' (a list of integers)."""
    try:
        with path.open("rb") as file:
            content = _BatchUnpickler(file, encoding="bytes").load()  # texts of Python 2 are bytes
        data_ND, labels_N = _unpickled_array(content[b"data"]), _unpickled_array(content[b"labels"])
        if data_ND.dtype != np.uint8 or data_ND.ndim != 2 or data_ND.shape[1] != 3072:
            raise ValueError(f"its data is {data_ND.dtype} {list(data_ND.shape)}; it must be uint8 [N, 3072]")
        if labels_N.dtype.kind not in "iu" or labels_N.ndim != 1:
            raise ValueError(f"its labels are {labels_N.dtype} {list(labels_N.shape)}; they must be integers [N]")
    except Exception as error:  # a damaged pickle raises anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or not a CIFAR-10 batch of the python version: {reason}") from None
    return _labelled(path, data_ND.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels_N)


class _BatchUnpickler(pickle.Unpickler):
    """Reads a pickle of numbers, texts and arrays.

    A pickle can call any function, and even NumPy's constructors can be made to read arbitrary memory. So the names in
    it only choose among what is defined here.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        if name not in PICKLED_NAMES:
            raise pickle.UnpicklingError(f"it must contain only arrays, but it contains {module}.{name}")
        return PICKLED_NAMES[name]


class _PickledArray:
    """An array, whose state sets its contents; or, since protocol 5, has them at once."""

    def __init__(self, *values: Any) -> None:
        self.array = _from_buffer(*values) if len(values) == 4 else None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        self.array = _from_buffer(content, dtype, shape, "F" if is_fortran else "C")


class _PickledDtype:
    """A dtype, whose state is its byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype = np.dtype(_text(name))

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(_text(state[1]))


PICKLED_NAMES: dict[str, Any] = {
    "_reconstruct": _PickledArray,
    "_frombuffer": _PickledArray,
    "ndarray": None,  # an argument of _reconstruct
    "dtype": _PickledDtype,
    "encode": lambda text, _: text.encode("latin1"),
}


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    return np.frombuffer(content, dtype.dtype).reshape(shape, order=_text(order))  # refuses dtypes of objects


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _unpickled_array(value: Any) -> np.ndarray:
    """Return a pickled array, or the array of a flat list of numbers."""
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return np.array(value)
    if not isinstance(value, _PickledArray) or value.array is None:
        raise pickle.UnpicklingError(f"it must contain arrays and lists of numbers, but it contains a {type(value)}")
    return value.array


def _labelled(path: Path, images_NHWC: np.ndarray, labels_N: np.ndarray) -> Labelled:
    if len(images_NHWC) != len(labels_N) or not len(labels_N):
        counts = f"{len(labels_N)} labels for {len(images_NHWC)} images"
        raise UserError(f"{path} has {counts}; it must have one label per image")
    if labels_N.min() < 0 or labels_N.max() > 9:
        raise UserError(f"{path} has labels from {labels_N.min()} to {labels_N.max()}; they must be 0 to 9")
    return np.ascontiguousarray(images_NHWC), labels_N.astype(np.int32)


def _one_of(directory: Path, names: list[str]) -> Path:
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"config.data.train is {str(directory)!r}; it must contain the file {' or '.join(names)}")


def _content(path: Path) -> bytes:
    try:
        with files.open_bytes(path) as file:
            return file.read()
    except files.DAMAGED as error:
        raise UserError(f"{path}: the compressed file is damaged ({error})") from None


IMAGE_READERS: dict[str, Callable[[Path], tuple[Labelled, Labelled, tuple[str, ...]]]] = {
    "mnist": _read_mnist,
    "cifar10": _read_cifar10,
}
