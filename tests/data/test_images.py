import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar.data import images
from jaxpar.data.examples import DataInfo, SameSize
from jaxpar.errors import UserError

from .conftest import load

RANDOM = np.random.default_rng(0)
MNIST = {"train": (200, 28, 28), "t10k": (30, 28, 28)}


def write_mnist(
    directory: Path, *, packed: bool = False, dot: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    directory.mkdir(exist_ok=True)
    content = {}
    for name, shape in MNIST.items():
        images = RANDOM.integers(0, 256, shape, np.uint8)
        labels = RANDOM.integers(0, 10, shape[0], np.uint8)
        content[name] = images, labels
        for kind, array in (("images", images), ("labels", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            path = directory / f"{name}-{kind}{'.' if dot else '-'}idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            data = header + array.tobytes()
            path.write_bytes(gzip.compress(data) if packed else data)
    return content


def write_cifar(directory: Path, *, binary: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    directory.mkdir()
    content = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = RANDOM.integers(0, 256, (40, 32, 32, 3), np.uint8)
        labels = RANDOM.integers(0, 10, 40)
        content[name] = images, labels
        planes = np.stack([np.concatenate([image[..., c].ravel() for c in range(3)]) for image in images])
        if binary:
            records = np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1)
            (directory / f"{name}.bin").write_bytes(records.tobytes())
        else:
            record = {b"data": planes, b"labels": labels.tolist(), b"batch_label": b"x", b"filenames": [b"f"]}
            (directory / name).write_bytes(pickle.dumps(record, protocol=2))
    return content


@pytest.fixture
def config(config: ConfigDict, tmp_path: Path) -> ConfigDict:
    config.data.source = "mnist"
    config.data.train = str(tmp_path / "images")
    config.data.validation_fraction = 0.2
    return config


def read(config: ConfigDict, workdir: Path) -> list[SameSize]:
    dataset = load(config, workdir)
    splits = [split for split in (dataset.train, dataset.validation, dataset.test) if isinstance(split, SameSize)]
    assert len(splits) == 3
    return splits


def fails(config: ConfigDict, workdir: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(config, workdir)
    assert "\n" not in str(caught.value)


def pairs(images: np.ndarray, labels: np.ndarray) -> set[tuple[bytes, int]]:
    return {(image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}


@pytest.mark.parametrize(("packed", "dot"), [(False, False), (True, False), (False, True)])
def test_mnist(config: ConfigDict, tmp_path: Path, packed: bool, dot: bool) -> None:
    written = write_mnist(tmp_path / "images", packed=packed, dot=dot)
    train, validation, test = read(config, tmp_path)
    assert np.array_equal(test.inputs_N[..., 0], written["t10k"][0])
    assert np.array_equal(test.labels_N, written["t10k"][1])
    assert abs(len(validation) / 200 - 0.2) < 0.1
    both = pairs(train.inputs_N, train.labels_N), pairs(validation.inputs_N, validation.labels_N)
    assert both[0] | both[1] == pairs(*written["train"])
    assert not both[0] & both[1]
    info = load(config, tmp_path).info
    assert info == DataInfo("image", (28, 28, 1), 10, tuple("0123456789"), 0, 0)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_cifar10(config: ConfigDict, tmp_path: Path, binary: bool, inner: bool) -> None:
    (tmp_path / "images").mkdir()
    names = "cifar-10-batches-bin" if binary else "cifar-10-batches-py"
    directory = tmp_path / "images" / (names if inner else "")
    if not inner:
        directory.rmdir()
    written = write_cifar(directory, binary=binary)
    config.data.source = "cifar10"
    config.data.augment = True
    train, validation, test = read(config, tmp_path)
    assert np.array_equal(test.inputs_N, written["test_batch"][0])
    assert np.array_equal(test.labels_N, written["test_batch"][1])
    expected = set().union(*(pairs(*written[f"data_batch_{i}"]) for i in range(1, 6)))
    assert pairs(train.inputs_N, train.labels_N) | pairs(validation.inputs_N, validation.labels_N) == expected
    assert (train.shift, train.flip, validation.shift, test.flip) == (True, True, False, False)
    assert load(config, tmp_path).info.class_names[:3] == ("airplane", "automobile", "bird")


def test_digits_are_never_flipped(config: ConfigDict, tmp_path: Path) -> None:
    write_mnist(tmp_path / "images")
    config.data.augment = True
    train, _, _ = read(config, tmp_path)
    assert (train.shift, train.flip) == (True, False)


def test_damaged_mnist(config: ConfigDict, tmp_path: Path) -> None:
    directory = tmp_path / "images"
    write_mnist(directory)
    images, labels = directory / "train-images-idx3-ubyte", directory / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    fails(
        config,
        tmp_path,
        r"train-images-idx3-ubyte has 156811 bytes, but its header has sizes .*, which take 156816; it is truncated",
    )
    images.write_bytes(whole[:9])
    fails(
        config,
        tmp_path,
        r"train-images-idx3-ubyte has 9 bytes, but its header has sizes .*, which take \d+; it is truncated",
    )
    images.write_bytes(labels.read_bytes())
    fails(config, tmp_path, r"train-images-idx3-ubyte starts with the magic number 00000801; .* starts with 00000803")
    images.write_bytes(whole)
    labels.write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 3) + b"\x01\x02\x03")
    fails(config, tmp_path, "train-labels-idx1-ubyte has 3 labels for 200 images; it must have one label per image")
    labels.write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 200) + b"\x0b" * 200)
    fails(config, tmp_path, "train-labels-idx1-ubyte has labels from 11 to 11; they must be 0 to 9")
    labels.unlink()
    fails(config, tmp_path, "config.data.train is '.*'; it must contain the file train-labels-idx1-ubyte")
    labels.with_suffix(".gz").write_bytes(gzip.compress(b"x" * 1000)[:-12])
    fails(config, tmp_path, "train-labels-idx1-ubyte.gz: the compressed file is damaged")


def test_images_of_two_sizes(config: ConfigDict, tmp_path: Path) -> None:
    write_mnist(tmp_path / "images")
    header = struct.pack(">BBBBIII", 0, 0, 8, 3, 30, 20, 28)
    (tmp_path / "images" / "t10k-images-idx3-ubyte").write_bytes(header + bytes(30 * 20 * 28))
    fails(
        config,
        tmp_path,
        r"images of shape \[28, 28, 1\] and test images of shape \[20, 28, 1\]; they must have the same shape$",
    )


def test_a_fraction_that_takes_no_image(config: ConfigDict, tmp_path: Path) -> None:
    write_mnist(tmp_path / "images")
    config.data.validation_fraction = 1e-9
    message = (
        "config.data.validation_fraction is 1e-09, which selects 0 of 200 images; it must be 0, or leave images in both"
    )
    fails(config, tmp_path, message)


def test_damaged_cifar10(config: ConfigDict, tmp_path: Path) -> None:
    config.data.source = "cifar10"
    directory = tmp_path / "images"
    write_cifar(directory, binary=False)
    path = directory / "data_batch_3"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    fails(config, tmp_path, "data_batch_3 is truncated or not a CIFAR-10 batch of the python version")
    path.write_bytes(pickle.dumps({b"data": print, b"labels": [1]}))
    fails(config, tmp_path, "data_batch_3 is .* not .*: it must contain only arrays, but it contains builtins.print")
    path.unlink()
    fails(config, tmp_path, "must contain the file data_batch_3")
    (directory / "data_batch_1").unlink()
    fails(config, tmp_path, r"contains data_batch_1 \(python version\) or data_batch_1.bin \(binary version\)")
    (directory / "data_batch_1.bin").write_bytes(bytes(3073 * 2 - 1))
    fails(config, tmp_path, "data_batch_1.bin has 6145 bytes, but a CIFAR-10 file has 3073 bytes per image")


@pytest.mark.parametrize("sizes", [(-1, -28, 28), (2**31 - 1, 2**31 - 1, 2**31 - 1)])
def test_idx_sizes_that_cannot_be(config: ConfigDict, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    write_mnist(tmp_path / "images")
    path = tmp_path / "images" / "train-images-idx3-ubyte"
    path.write_bytes(struct.pack(">BBBB3i", 0, 0, 8, 3, *sizes) + bytes(784))
    fails(config, tmp_path, "train-images-idx3-ubyte has 800 bytes, but its header has sizes")


class Forged:
    """An array in a pickle whose parts do not fit each other."""

    def __init__(self, dtype: str, shape: tuple[int, ...], content: Any) -> None:
        self.state = (1, shape, np.dtype(dtype), False, content)

    def __reduce__(self) -> Any:
        rebuild = np.zeros(1).__reduce__()
        assert isinstance(rebuild, tuple)
        return (*rebuild[:2], self.state)


PLANES, LABELS = np.zeros((2, 3072), np.uint8), [1, 2]
DOUBLED: Any = [0]
DOUBLED_TUPLES: Any = (0,)
for _ in range(40):
    DOUBLED, DOUBLED_TUPLES = [DOUBLED, DOUBLED], (DOUBLED_TUPLES, DOUBLED_TUPLES)
LISTS = "it must contain arrays and lists of numbers"
FORGED: dict[str, tuple[Any, Any, str]] = {
    "pointers": (Forged("O", (2, 3072), b"\x01" * 8 * 6144), LABELS, "cannot create an OBJECT array"),
    "too short": (Forged("u1", (2, 3072), b"abc"), LABELS, "cannot reshape array of size 3"),
    "a number of bytes": (
        Forged("u1", (2, 3072), 6144),
        LABELS,
        "a bytes-like object is required",
    ),
    "negative sizes": (Forged("u1", (-2, -3072), bytes(6144)), LABELS, "can only specify one unknown dimension"),
    "floats": (PLANES / np.float32(255), LABELS, "its data is float32 .*; it must be uint8"),
    "large integers": (PLANES + np.int64(300), LABELS, "its data is int64 .*; it must be uint8"),
    "other sizes": (PLANES[:, :100], LABELS, r"its data is uint8 \[2, 100\]; it must be uint8 \[N, 3072\]"),
    "fractional labels": (PLANES, [1.0, 2.7], "its labels are float64 .*; they must be integers"),
    "labels of nan": (PLANES, [1, np.nan], "its labels are float64 .*; they must be integers"),
    "nested labels": (PLANES, [[1], [2]], LISTS),
    "labels of two axes": (PLANES, np.ones((2, 1), int), r"its labels are int64 \[2, 1\]; they must be integers"),
    "labels of texts": (PLANES, [b"1", b"2"], LISTS),
    "lists that double 40 times": (PLANES, DOUBLED, LISTS),
    "tuples that double 40 times": (DOUBLED_TUPLES, LABELS, LISTS),
    "a nested tuple": (((0,), 1), LABELS, LISTS),
    "many times one array": ([PLANES] * 9, LABELS, LISTS),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_cifar10(config: ConfigDict, tmp_path: Path, name: str) -> None:
    config.data.source = "cifar10"
    write_cifar(tmp_path / "images", binary=False)
    data, labels, reason = FORGED[name]
    (tmp_path / "images" / "data_batch_2").write_bytes(pickle.dumps({b"data": data, b"labels": labels}, protocol=2))
    fails(config, tmp_path, f"data_batch_2 is .* not a CIFAR-10 batch of the python version: {reason}")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i8"])
def test_pickles_of_any_protocol(tmp_path: Path, protocol: int, dtype: str) -> None:
    planes, labels = np.asfortranarray(RANDOM.integers(0, 256, (4, 3072), np.uint8)), np.arange(4).astype(dtype)
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps({b"data": planes, b"labels": labels}, protocol=protocol))
    images_NHWC, labels_N = images._read_pickled(path)
    np.testing.assert_array_equal(images_NHWC.transpose(0, 3, 1, 2).reshape(4, -1), planes)
    assert labels_N.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cnumpy\ndtype\n}X\x04\x00\x00\x00nameK\x01sb.",  # sets an attribute of the class of dtypes
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # makes an ndarray without arguments
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02K\x01.",  # is not a dict
    ],
)
def test_what_a_pickle_may_not_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pickle").write_bytes(content)
    with pytest.raises(UserError, match="not a CIFAR-10 batch"):
        images._read_pickled(tmp_path / "pickle")


def test_the_fingerprint_is_of_the_images(config: ConfigDict, tmp_path: Path) -> None:
    write_mnist(tmp_path / "images")
    first = load(config, tmp_path).fingerprint
    assert load(config, tmp_path).fingerprint == first
    path = tmp_path / "images" / "train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] = (content[-1] + 1) % 10
    path.write_bytes(bytes(content))
    assert load(config, tmp_path).fingerprint != first
