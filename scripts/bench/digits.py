"""Writes scikit-learn's handwritten digits as MNIST files, on which an MLP trains in seconds.

    scripts/python scripts/bench/digits.py DIR

DIR then is a value for config.data.train with config.data.source=mnist. There are 1,797 images of 8x8 pixels; every
fifth is a test image. Needs the extra `dev` (scikit-learn).
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from jaxpar.command_line import Parser
from jaxpar.errors import exit_code


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.require("directory", "scripts/bench/digits.py runs/digits", rule="a directory")
    directory = Path(parser.parse().directory)
    directory.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    images_NHW = (digits.images * 255 / 16).astype(np.uint8)  # values are from 0 to 16
    is_test_N = np.arange(len(images_NHW)) % 5 == 4
    for name, chosen_N in (("train", ~is_test_N), ("t10k", is_test_N)):
        write_idx(directory / f"{name}-images-idx3-ubyte", images_NHW[chosen_N])
        write_idx(directory / f"{name}-labels-idx1-ubyte", digits.target[chosen_N].astype(np.uint8))
    print(f"{directory}: {np.sum(~is_test_N)} training and {np.sum(is_test_N)} test images")


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an array of uint8 in the format of MNIST's files."""
    magic = bytes([0, 0, 8, array.ndim])  # 8: the code of uint8
    path.write_bytes(magic + np.array(array.shape, ">i4").tobytes() + array.tobytes())


if __name__ == "__main__":
    sys.exit(exit_code(main))
