"""Plain data and arrays as bytes, without pickle: what ranks send each other on the control group.

A frame is an 8-byte header length, a JSON header and the raw bytes of the arrays one after the other. Only JSON
values and arrays of the listed types can travel, so a frame can never carry code.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

_DTYPES = {"int8", "int32", "int64", "uint8", "float32", "float64"}
_ARRAY_KEY = "\x00array"


def encode(tree: Any) -> bytes:
    """Encode JSON values, lists, string-keyed dicts and numpy arrays."""
    arrays: list[np.ndarray] = []

    def plain(node: Any) -> Any:
        if isinstance(node, np.ndarray):
            if node.dtype.name not in _DTYPES:
                raise TypeError(f"an array of {node.dtype} cannot be sent; allowed: {sorted(_DTYPES)}")
            # by name: in this machine's byte order
            arrays.append(np.ascontiguousarray(node, dtype=node.dtype.name))
            return {_ARRAY_KEY: [node.dtype.name, list(node.shape)]}
        if isinstance(node, dict):
            for key in node:
                # JSON would turn other keys into strings without a word
                if not isinstance(key, str) or key == _ARRAY_KEY:
                    raise TypeError(f"a dict with the key {key!r} cannot be sent")
            return {key: plain(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [plain(value) for value in node]
        return node

    header = json.dumps(plain(tree), separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])


def decode(frame: bytes | bytearray | memoryview) -> Any:
    """The inverse of `encode`. Arrays are copies that own their memory."""
    view = memoryview(frame)
    start = 8 + int.from_bytes(view[:8], "little")
    offset = start

    def rebuild(node: Any) -> Any:
        nonlocal offset
        if isinstance(node, dict):
            if _ARRAY_KEY in node:
                name, shape = node[_ARRAY_KEY]
                size = _num_bytes(name, shape)
                array = np.frombuffer(view[offset : offset + size], dtype=name).reshape(shape).copy()
                offset += size
                return array
            return {key: rebuild(value) for key, value in node.items()}
        if isinstance(node, list):
            return [rebuild(value) for value in node]
        return node

    tree = rebuild(json.loads(bytes(view[8:start])))
    if offset != len(view):
        raise ValueError(f"a frame of {len(view)} bytes announces {offset}")
    return tree


def _num_bytes(name: str, shape: list[int]) -> int:
    """How many bytes an announced array takes; refuses what `encode` never announces."""
    if name not in _DTYPES:
        raise TypeError(f"a frame announces an array of {name!r}")
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"a frame announces an array of shape {shape!r}")
    return math.prod(shape) * np.dtype(name).itemsize
