import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar.data.examples import DataInfo, Images
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


def read(config: ConfigDict, workdir: Path) -> list[Images]:
    dataset = load(config, workdir)
    splits = [split for split in (dataset.train, dataset.validation, dataset.test) if isinstance(split, Images)]
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
    assert np.array_equal(test.images_NHWC[..., 0], written["t10k"][0])
    assert np.array_equal(test.labels_N, written["t10k"][1])
    assert abs(len(validation) / 200 - 0.2) < 0.1
    both = pairs(train.images_NHWC, train.labels_N), pairs(validation.images_NHWC, validation.labels_N)
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
    assert np.array_equal(test.images_NHWC, written["test_batch"][0])
    assert np.array_equal(test.labels_N, written["test_batch"][1])
    expected = set().union(*(pairs(*written[f"data_batch_{i}"]) for i in range(1, 6)))
    assert pairs(train.images_NHWC, train.labels_N) | pairs(validation.images_NHWC, validation.labels_N) == expected
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
    fails(config, tmp_path, r"train-images-idx3-ubyte has 156811 bytes, but 156816 by its header; it is truncated")
    images.write_bytes(whole[:9])
    fails(config, tmp_path, r"train-images-idx3-ubyte has 9 bytes, but \d+ by its header; it is truncated")
    images.write_bytes(labels.read_bytes())
    fails(config, tmp_path, r"train-images-idx3-ubyte starts with the magic number 00000801; .* starts with 00000803")
    images.write_bytes(whole)
    labels.write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 3) + b"\x01\x02\x03")
    fails(config, tmp_path, "train-labels-idx1-ubyte has 3 labels for 200 images")
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
    fails(config, tmp_path, "images: training and test images have different sizes")


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
    fails(config, tmp_path, "data_batch_3 is .* not .*: builtins.print is not allowed in it")
    path.unlink()
    fails(config, tmp_path, "must contain the file data_batch_3")
    (directory / "data_batch_1").unlink()
    fails(config, tmp_path, r"contains data_batch_1 \(python version\) or data_batch_1.bin \(binary version\)")
    (directory / "data_batch_1.bin").write_bytes(bytes(3073 * 2 - 1))
    fails(config, tmp_path, "data_batch_1.bin has 6145 bytes, but a CIFAR-10 file has 3073 bytes per image")


def test_the_fingerprint_is_of_the_images(config: ConfigDict, tmp_path: Path) -> None:
    write_mnist(tmp_path / "images")
    first = load(config, tmp_path).fingerprint
    assert load(config, tmp_path).fingerprint == first
    path = tmp_path / "images" / "train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] = (content[-1] + 1) % 10
    path.write_bytes(bytes(content))
    assert load(config, tmp_path).fingerprint != first
