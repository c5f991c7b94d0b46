"""Changes files at random, by what they are made of: JSON, shapes, dtypes, bytes."""

import json
import math
import pathlib
import random
from typing import Any

from . import own


_values = [
    *(None, True, 0, -1, 1, 7, 1.5, 2**31, 2**62, 10**18, 10**30, "", "x", [], {}),
    *([-1], [0], [1] * 40, [10**18, 10**18], [0, 2**63], {"a": 1}, "F32", "U8", "../x"),
    *("/etc/passwd", "F16", [2**32, 2**32], [[]], float("1e400"), "\udc00", "a.weight"),
    *("F99_E9M9", "BOOL", "F4", "BF16", {"list": []}, {"dict": []}, {"array": "bool"}),
]
# What stands for text that is too deep, or too long, to be a value.
_texts = {
    "@deep": "[" * 10**5 + "]" * 10**5,
    "@objects": '{"a":' * 300 + "0" + "}" * 300,
    "@lists": "[" + "[]," * 10**5 + "0]",
    "@digits": "9" * 10**5,
}
_numbers = [
    *(0, 1, 2, 3, 8, 9, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
]


def _changed(rng: random.Random, tree: Any) -> Any:
    # One node of a JSON tree is replaced, removed, renamed, repeated or nested.
    if rng.random() < 0.3 or not isinstance(tree, dict | list) or not tree:
        return _node(rng, tree)
    if isinstance(tree, list):
        i = rng.randrange(len(tree))
        what = rng.random()
        if what < 0.1:
            return [*tree[:i], *tree[i + 1 :]]
        if what < 0.2:
            return [*tree[:i], tree[i], *tree[i:]]
        return [*tree[:i], _changed(rng, tree[i]), *tree[i + 1 :]]
    key = rng.choice(list(tree))
    tree = dict(tree)
    what = rng.random()
    if what < 0.1:
        tree[rng.choice([*tree, "__metadata__", "", "a.weight"])] = tree.pop(key)
    elif what < 0.2:
        del tree[key]
    elif what < 0.3:
        tree[key] = tree[rng.choice(list(tree))]
    else:
        tree[key] = _changed(rng, tree[key])
    return tree


def _node(rng, node):
    what = rng.random()
    if what < 0.1:
        return [node]
    if what < 0.2:
        return {rng.choice(["a", "list", "dict", "array"]): node}
    if what < 0.25:
        return rng.choice(list(_texts))
    if what < 0.4 and type(node) is int:
        return node + rng.choice([-1, 1, 2])
    return rng.choice(_values)


def _dumped(tree: Any) -> str:
    text = json.dumps(tree)
    for name, long in _texts.items():
        text = text.replace(f'"{name}"', long)
    return text


def _changed_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    end = min(len(changed), 2**11)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if end == 0:
            break
        i = rng.randrange(end)
        what = rng.randrange(6)
        if what == 0:
            changed[i] = rng.randrange(256)
        elif what == 1:
            changed[i] ^= 1 << rng.randrange(8)
        elif what == 2:
            size = rng.choice([4, 8])
            number = rng.choice(_numbers) % 2 ** (8 * size)
            changed[i : i + size] = number.to_bytes(size, "little")
        elif what == 3:
            del changed[i : i + rng.randrange(1, 20)]
        elif what == 4:
            changed[i:i] = changed[i : i + rng.randrange(1, 20)]
        else:
            del changed[rng.randrange(len(changed)) :]
        end = min(len(changed), 2**11)
    return bytes(changed)


_sizes = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0", "F99_E9M9"], 1),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 2),
    **dict.fromkeys(["F32", "I32", "U32"], 4),
    **dict.fromkeys(["F64", "I64", "U64"], 8),
}


def _of_another_type(rng: random.Random, data: bytes) -> bytes:
    """One tensor is a scalar, or has one axis less, or one more, or another dtype."""
    header, rest = own.read_header(data)
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if rng.random() < 0.5:
        ranks = [[], [1], [1, *shape], [*shape, 1], shape[1:], shape[:-1], shape[::-1]]
        entry["shape"] = rng.choice(ranks)
    else:
        entry["dtype"] = rng.choice(list(_sizes))
    nbytes = math.prod(entry["shape"]) * _sizes.get(entry["dtype"], 1)
    part = rest[start:end][:nbytes].ljust(nbytes, b"\0")
    more = nbytes - (end - start)
    # The bytes of those behind it move along.
    for other in header.values():
        offsets = other.get("data_offsets")
        if offsets and offsets[0] >= end:
            other["data_offsets"] = [offset + more for offset in offsets]
    entry["data_offsets"] = [start, start + nbytes]
    return own.with_header(header, rest[:start] + part + rest[end:])


def mutated(rng: random.Random, path: pathlib.Path, data: bytes) -> bytes:
    """Another file, from the bytes of one."""
    what = rng.random()
    if path.suffix == ".json" and what < 0.7:
        return _dumped(_changed(rng, json.loads(data))).encode()
    if path.suffix == ".json" and what < 0.9:
        before = rng.choice([b"\xef\xbb\xbf", b"// ", b"\xe9", b"[" * 10**5, b""])
        return before + data + rng.choice([b"", b"// ", b"}", bytes(9)])
    if path.suffix != ".safetensors" or what < 0.2:
        return _changed_bytes(rng, data)
    header, rest = own.read_header(data)
    if what < 0.4:
        return _of_another_type(rng, data)
    if what < 0.8 and "eqquant" in header.get("__metadata__", {}):
        layout = own.layout_of(data)
        for _ in range(rng.choice([1, 1, 2])):
            layout = _changed(rng, layout)
        return own.with_layout(data, _dumped(layout))
    for _ in range(rng.choice([1, 1, 2])):
        header = _changed(rng, header) if isinstance(header, dict) else header
    text = _dumped(header).encode()
    return len(text).to_bytes(8, "little") + text + rest
