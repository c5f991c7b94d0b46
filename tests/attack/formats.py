from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import eqquant as eqq

from .case import Case


def _block(case: Case, channel: bool = True) -> int | None:
    sizes = (16, 32, 48, 64, 80, 128, 240, 256)
    return None if channel and case.chance(0.25) else case.pick(sizes)


def _dtype(case: Case) -> Any:
    return case.pick((jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16))


def _scaled(cls: type) -> Callable[[Case], eqq.AbstractFormat]:
    return lambda case: cls(_block(case), scale_dtype=_dtype(case))


def _int4(case):
    return eqq.Int4(_block(case), case.chance(0.5), scale_dtype=_dtype(case))


def _ternary(case):
    scale = case.pick(("channel", "channel", "tensor"))
    return eqq.Ternary(
        _block(case) if scale == "channel" else None,
        scale=scale,
        rule=case.pick(("absmean", "threshold")),
        scale_dtype=_dtype(case),
        radix=case.pick((3, 3, 4)),
    )


def _dynamic8(case):
    # (Without a sign it is for numbers that are not negative.)
    return eqq.Dynamic8(
        _block(case), dithered=case.chance(0.2), scale_dtype=_dtype(case)
    )


def _square4(case):
    return eqq.Square4(
        _block(case), dithered=case.chance(0.2), scale_dtype=_dtype(case)
    )


def _int(case):
    return eqq.Int(
        case.integer(2, 8),
        _block(case),
        case.pick((None, "zero_point", "minimum")),
        ordered=case.chance(0.2),
        scale_dtype=_dtype(case),
    )


def _fp8(case):
    scale = case.pick(("channel", "channel", "tensor"))
    return eqq.FP8(
        case.pick(("e4m3", "e5m2")),
        _block(case) if scale == "channel" else None,
        scale=scale,
        scale_dtype=_dtype(case),
    )


def _nested(case):
    base = case.pick((eqq.NF4, eqq.Int8, eqq.Int4, eqq.Binary, eqq.FP4, eqq.Ternary))
    base = base(_block(case, channel=False), scale_dtype=_dtype(case))
    scale = case.pick(
        (
            eqq.Int8(32),
            eqq.Int8(None),
            eqq.Int8(256),
            eqq.FP8(),
            eqq.formats.BnbScale(32),
            eqq.Dynamic8(64),
        )
    )
    return eqq.Nested(base, scale=scale)


def _rotated(case):
    inner = case.pick((eqq.NF4, eqq.Int8, eqq.Int4, eqq.Ternary, eqq.formats.Q4_K))
    block = 2 ** case.integer(1, 8)
    return eqq.Rotated(families[inner](case), block, case.integer(0, 9))


def _trellis(case):
    return eqq.Trellis(
        case.integer(1, 8), case.integer(8, 10), scale_dtype=_dtype(case)
    )


_plain = (
    eqq.MXFP8,
    eqq.formats.IQ4_NL,
    eqq.formats.IQ4_XS,
    eqq.formats.Q1_0,
    eqq.formats.Q2_0,
    eqq.formats.Q2_K,
    eqq.formats.Q3_K,
    eqq.formats.Q4_0,
    eqq.formats.Q4_1,
    eqq.formats.Q4_K,
    eqq.formats.Q5_0,
)
_plain += (
    eqq.formats.Q5_1,
    eqq.formats.Q5_K,
    eqq.formats.Q6_K,
    eqq.formats.Q8_0,
    eqq.formats.TQ1_0,
    eqq.formats.TQ2_0,
)

# A family for each class of formats there is.
families: dict[type, Callable[[Case], eqq.AbstractFormat]] = {
    **{cls: _scaled(cls) for cls in (eqq.NF4, eqq.Int8, eqq.Binary, eqq.FP4)},
    eqq.formats.BnbFP4: _scaled(eqq.formats.BnbFP4),
    eqq.Int4: _int4,
    eqq.Ternary: _ternary,
    eqq.Dynamic8: _dynamic8,
    eqq.Square4: _square4,
    eqq.Int: _int,
    eqq.FP8: _fp8,
    eqq.Nested: _nested,
    eqq.Rotated: _rotated,
    eqq.Trellis: _trellis,
    eqq.formats.BnbScale: lambda case: eqq.formats.BnbScale(case.pick((32, 64, 256))),
    eqq.MXFP4: lambda case: eqq.MXFP4(case.pick(("even", "zero"))),
    eqq.NVFP4: lambda case: eqq.NVFP4(case.chance(0.5)),
    **{cls: lambda case, cls=cls: cls() for cls in _plain},
    eqq.RSRBinary: lambda case: eqq.RSRBinary(case.integer(1, 12)),
    eqq.RSRTernary: lambda case: eqq.RSRTernary(case.integer(1, 12)),
}
# Those that have kernels of their own are drawn more often.
_often = (eqq.NF4, eqq.Int8, eqq.Int4, eqq.Ternary, eqq.Binary, eqq.Nested)
_every = [*families, *2 * _often]


def draw_format(case: Case) -> eqq.AbstractFormat:
    return families[case.pick(_every)](case)


def draw_multiplied(case: Case) -> eqq.AbstractFormat:
    """One whose products are compared. (The errors of kernels are relative to what they
    multiply. Of `Rotated` that is rotated: see `tests/test_rotated.py`.)"""
    format = draw_format(case)
    return format.format if isinstance(format, eqq.Rotated) else format


def draw_often(case: Case) -> eqq.AbstractFormat:
    """One of those that have kernels that round."""
    return families[
        case.pick((*_often, eqq.formats.Q8_0, eqq.formats.Q4_0, eqq.formats.TQ1_0))
    ](case)


def draw_activation(case: Case) -> eqq.AbstractFormat | None:
    if case.chance(0.8):
        return None
    return case.pick((eqq.Int8(), eqq.Int8(), eqq.Int8(32), eqq.FP8(), eqq.NF4(32)))


def name_of(format: eqq.AbstractFormat) -> str:
    return type(format).__name__
