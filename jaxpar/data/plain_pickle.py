"""Reads pickles of dicts of numbers, texts, numeric NumPy arrays and flat lists, and of nothing else.

A pickle can call any function, and even NumPy's own constructors can be made to read arbitrary memory (an object array
over bytes takes them for pointers). Therefore no name in a pickle leads to a function of NumPy: arrays are rebuilt
here, from checked values. And a tuple or list of a few bytes can contain another one many times over, so that its
contents, or its hash if it is a key, take forever. Therefore opcodes that refer to an earlier object are checked before
any object is made: they can refer to short texts, names and arrays only, so the work is linear in the size of the file.
"""

import io
import math
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

NUMERIC = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])")


def load(path: Path) -> Any:
    """Return the contents of a pickle; texts of Python 2 are bytes. Raises any exception if it is damaged."""
    content = path.read_bytes()
    _check_opcodes(content)
    return _rebuilt(_Unpickler(io.BytesIO(content)).load())


TEXTS = (
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
LONGEST_SHARED = 1000  # characters or bytes of a text that other opcodes refer to
SHARED = ("GLOBAL", "STACK_GLOBAL", "REDUCE")  # opcodes whose results other opcodes can refer to: names and arrays
PUTS, GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
ALLOWED = {
    *(*TEXTS, *SHARED, *PUTS, *GETS),
    *("PROTO", "FRAME", "STOP", "MARK", "BUILD", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *("FLOAT", "BINFLOAT", "BYTEARRAY8"),
}


def _check_opcodes(content: bytes) -> None:
    """Raise UnpicklingError for an opcode that pickles of arrays do not need, or that shares what can be large."""
    memo: dict[int, bool] = {}  # whether other opcodes can refer to the object with this number
    previous, size = "", 0
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name not in ALLOWED:
            raise pickle.UnpicklingError(f"it must contain only arrays, but it contains {name}")
        if name in PUTS:
            number = len(memo) if argument is None else int(argument)
            memo[number] = previous in SHARED or (previous in TEXTS and size <= LONGEST_SHARED)
        elif name in GETS and not memo.get(argument):
            raise pickle.UnpicklingError("it refers to a list, a tuple or a long text more than once")
        previous, size = name, len(argument) if name in TEXTS else 0


class _Refusing:
    """Base of all objects that a pickle can name: their attributes cannot be set."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("only arrays have a state in it")


class _ArrayClass(_Refusing):
    """The class `numpy.ndarray`, which is only passed to `_reconstruct`."""

    __slots__ = ()


class _Array(_Refusing):
    """An array whose state follows: version, shape, dtype, whether its order is Fortran's, and bytes."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        self.value = _array(content, dtype, shape, "F" if is_fortran else "C")


class _DType(_Refusing):
    """A numeric dtype, whose state is its byte order."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1])
        self.name = order + self.name.lstrip("<>=|")
        _checked(self.name)


class _Function(_Refusing):
    """One of the functions that pickles of arrays call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *values: Any) -> Any:
        if self.name == "_reconstruct":
            return _Array()
        if self.name == "dtype":
            return _DType(_checked(_text(values[0])))
        if self.name == "_frombuffer":
            content, dtype, shape, order = values
            return _array(content, dtype, shape, _text(order))
        text, encoding = values
        if _text(encoding) != "latin1":
            raise pickle.UnpicklingError(f"it must not contain the encoding {encoding!r}")
        return text.encode("latin1")


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Function("_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"): _Function("_frombuffer"),
    ("numpy", "dtype"): _Function("dtype"),
    ("numpy", "ndarray"): _ArrayClass(),
    ("_codecs", "encode"): _Function("encode"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        key = (module.replace("_core", "core"), name)
        if key not in NAMES:
            raise pickle.UnpicklingError(f"it must contain only arrays, but it contains {module}.{name}")
        return NAMES[key]


def _array(content: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    """Return the array with these bytes. Raises ValueError if they do not match the dtype and the shape."""
    if not isinstance(dtype, _DType) or not isinstance(shape, tuple):
        raise pickle.UnpicklingError("an array in it has no dtype or no shape")
    if not isinstance(content, bytes | bytearray):  # bytes(10**10) would make as many zeros
        raise pickle.UnpicklingError(f"the content of an array in it is {type(content).__name__}; it must be bytes")
    sizes = [int(size) for size in shape]
    flat = np.frombuffer(content, _checked(dtype.name))
    if min(sizes, default=0) < 0 or math.prod(sizes) != len(flat) or order not in ("C", "F"):
        raise ValueError(f"an array of shape {sizes} in it has {len(flat)} elements")
    return flat.reshape(sizes, order="F" if order == "F" else "C")


def _checked(name: str) -> str:
    if not NUMERIC.fullmatch(name):
        raise pickle.UnpicklingError(f"it must not contain the dtype {name!r}")
    return name


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _rebuilt(value: Any) -> Any:
    """Return the dict with its arrays in place of what stands for them."""
    if not isinstance(value, dict):
        raise pickle.UnpicklingError(f"it must contain a dict, but it contains a {type(value).__name__}")
    return {key: _rebuilt_item(item) for key, item in value.items()}


def _rebuilt_item(item: Any) -> Any:
    if isinstance(item, _Array):
        if item.value is None:
            raise pickle.UnpicklingError("an array in it has no contents")
        return item.value
    if isinstance(item, np.ndarray):
        return item
    for value in item if isinstance(item, list) else [item]:
        if value is not None and not isinstance(value, int | float | str | bytes):
            kind = type(value).__name__.lstrip("_").lower()
            raise pickle.UnpicklingError(f"values must be arrays or flat lists, but it contains a nested {kind}")
    return item
