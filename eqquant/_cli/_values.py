import argparse
import re
from typing import Any


_units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def as_bytes(text: str) -> int:
    """Parses a number of bytes, such as `5GB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([KMGT]?B?)", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _units:
        raise argparse.ArgumentTypeError(
            f"should be a number of bytes, as in 5GB. Got {text!r}"
        )
    size = float(match[1]) * _units[match[2].upper()]
    if not 1 <= size < 2**63:
        raise argparse.ArgumentTypeError(f"should be 1 to 2^63. Got {text!r}")
    return int(size)


def as_count(text: str) -> int:
    """Parses a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"should be 1 or more. Got {text!r}")
    return int(text)


def as_rule(text: str) -> tuple[str, str]:
    """Parses a rule, such as `*.embed*=int8`: a pattern and a format."""
    pattern, equals, action = text.partition("=")
    if not (pattern and equals and action):
        raise argparse.ArgumentTypeError(
            f"should be a pattern and a format, as in '*.embed*=int8'. Got {text!r}"
        )
    return pattern, action


def as_axis(text: str) -> tuple[str, int | tuple[int, ...]]:
    """Parses an axis of matrices, such as `-1` or `h.*=-2`, with its pattern, or the
    axes of filters, as in `conv.*=1,2,3`."""
    pattern, equals, axis = text.rpartition("=")
    is_one = axis in ("-1", "-2")
    is_several = re.fullmatch(r"-?\d(,-?\d)+", axis) is not None
    if not (is_one or is_several) or (equals and not pattern):
        raise argparse.ArgumentTypeError(
            f"should be -1 or -2, or as in 'h.*=-2' or 'conv.*=1,2,3'. Got {text!r}"
        )
    axes = tuple(map(int, axis.split(",")))
    return pattern or "*", axes[0] if is_one else axes


def format_from_text(text: str) -> Any:
    """Parses a format, by its name or as written in Python: `nf4` or `NF4(128)`. `none`
    becomes `None`, and names of dtypes are returned unchanged. Raises a `ValueError` if
    there is no such format."""
    from ..formats import as_format

    if text.lower() in ("f32", "f16", "bf16"):
        return text.lower()
    return None if text.lower() == "none" else as_format(text)
