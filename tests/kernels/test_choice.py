"""Which kernel runs: the one that is predicted to be the fastest, on each machine that
was measured."""

import sys

import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels._table as table
import eqquant.kernels.cpu._costs as costs
from eqquant.formats import Layout, Q4_K
from eqquant.kernels import choose, Problem, supporting
from eqquant.kernels.cpu._xla import fuses

from ..helpers import main_formats, normal
from .levels import available
from .page import kernel_table, parts


amd, intel = "AuthenticAMD", "GenuineIntel"
_avx512 = {"avx2", "avx512"}


@pytest.fixture
def on(monkeypatch):
    """Has kernels chosen as on another machine, which has no more than this one."""

    def on(vendor, *features):
        if features[-1] not in available:
            pytest.skip(f"needs {features[-1]}")
        monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", features[-1])
        found = costs.Processor(vendor, None, frozenset(features))
        monkeypatch.setattr(costs, "_processor", lambda level: found)
        forget()

    yield on
    monkeypatch.undo()
    forget()


def forget():
    for cached in (costs._machine, costs._of_kernel, table._choose_once):
        cached.cache_clear()


def problem(format, rows, shape=(4096, 4096), across=False, activation=None):
    n, k = shape
    return Problem(
        product="matmul_transposed" if across else "matmul",
        platform="cpu",
        layout=Layout(format, 0, -1),
        activation=activation,
        rows=rows,
        n=n,
        k=k,
        stack=1,
        dtype=np.dtype(np.float32),
        precision=None,
    )


def chosen(*args, **kwargs):
    return choose(problem(*args, **kwargs)).kernel.name


# NF4, the default, is neither slow nor rounded to bfloat16 on CPUs without AVX512.
def test_nf4_on_avx2(on):
    on(intel, "avx2")
    for rows in (8, 32, 64, 128):
        kernel = choose(problem(eqq.NF4(), rows, (2048, 2048))).kernel
        assert kernel.name.startswith("native_decoded"), rows
        assert kernel.short_bound(problem(eqq.NF4(), rows)) < 4e-3


def test_int8_on_avx512(on):
    on(intel, "avx2", "avx512")
    assert chosen(eqq.Int8(), 2) == "native"
    for rows in (16, 64, 128):
        assert chosen(eqq.Int8(), rows) == "native_decoded_integers"


# Bytes that a table turns into floats: on Intel's CPUs without AMX, products of
# bfloat16 take as long as those of float32.
def test_where_bfloat16_is_slow(on):
    fp8 = eqq.FP8(), 32
    on(amd, "avx2", "avx512", "avx512_bf16")
    assert chosen(*fp8) == "native_decoded_bfloat16"
    on(intel, "avx2", "avx512", "avx512_bf16")
    assert "bfloat16" not in chosen(*fp8)


@pytest.mark.skipif(not fuses, reason="needs JAX 0.11")
def test_narrow_products_across_blocks(on):
    on(amd, "avx2", "avx512", "avx512_bf16")
    for format in (eqq.NF4(), eqq.Int4(), eqq.Int8()):
        assert chosen(format, 32, (16384, 128), across=True) == "native"


# Sums that are looked up are faster than products in bfloat16, and more accurate.
def test_one_bit(on):
    on(amd, "avx2", "avx512", "avx512_bf16")
    assert {chosen(eqq.Binary(), rows) for rows in (1, 8, 64)} == {"native"}


def test_without_the_library(monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    for format in (eqq.Int4(), eqq.NF4(), eqq.Int8(64)):
        assert {chosen(format, rows) for rows in (4, 8)} == {"unit_tiles"}


# Of those that are measured, the chosen one is predicted to be the fastest, but for
# what takes as long.
@pytest.mark.parametrize("rows", (1, 2, 4, 8, 16, 64, 128, None))
@main_formats
def test_the_fastest_is_chosen(format, rows):
    for across in (False, True):
        found = problem(format, rows, (512, 1024), across)
        its = [k.seconds(found) for k in supporting(found) if k.seconds is not None]
        kernel = choose(found).kernel
        assert kernel.name == "reference" or kernel.seconds(found) <= 1.08 * min(its)


def test_what_explain_tells():
    x, q = normal(16, 1024), eqq.quantize(normal(1024, 512), "nf4")
    told = eqq.explain(x, q)
    first, *_ = told.seconds
    assert first == told.kernel and len(told.seconds) > 3
    assert told.seconds[first] <= 1.08 * min(told.seconds.values())
    text = " ".join(f"{told}".split())
    assert f"Predicted times on one core: `{first}`" in text
    assert f"from measurements on {told.measured}." in text


@pytest.mark.parametrize(
    "rows, each", ((1, 10), (2, 12), (3, 17), (4, 22), (34, 62), (64, 102), (94, 142))
)
def test_between_measurements(rows, each):
    cost = costs.Cost([1, 2, 4, 64], [10.0, 12.0, 22.0, 102.0], 0.0)
    assert cost.of(rows) == pytest.approx(each)
    assert costs.Cost([1], [10.0], 0.0).of(rows) == 10.0


# A machine that was not measured takes the numbers of one that has no more.
@pytest.mark.parametrize(
    "vendor, features, taken",
    (
        (amd, {"avx2"}, {"avx2"}),
        (intel, {"avx2"}, {"avx2"}),
        (intel, {"avx2", "avx_vnni"}, {"avx2", "avx_vnni"}),
        (intel, _avx512 | {"avx512_bf16"}, _avx512),
        (intel, _avx512 | {"avx512_bf16", "amx"}, _avx512 | {"avx512_bf16", "amx"}),
        (amd, _avx512 | {"avx512_bf16"}, _avx512 | {"avx512_bf16"}),
        (None, set(), {"avx2"}),
    ),
)
def test_the_nearest_machine(vendor, features, taken, monkeypatch):
    here = costs.Processor(vendor, None, frozenset(features))
    monkeypatch.setattr(costs, "_processor", lambda level: here)
    found = costs._machine.__wrapped__(None)
    assert found.processor.features == taken


# Families of AMD have the same instruction sets, and other costs.
@pytest.mark.parametrize(
    "vendor, family, taken",
    ((amd, 25, 25), (amd, 26, 26), (amd, 27, 26), (intel, 6, None), (None, None, None)),
)
def test_the_nearest_family(vendor, family, taken, monkeypatch):
    features = frozenset(_avx512 | {"avx512_bf16"})
    here = costs.Processor(vendor, family, features)
    monkeypatch.setattr(costs, "_processor", lambda level: here)
    found = costs._machine.__wrapped__(None)
    assert found.processor.family == taken and found.fuses == fuses


# Nor was any ARM processor: they take those of x86, and say so.
@pytest.mark.parametrize(
    "flags, features, like",
    (
        ("fp asimd", {"neon"}, {"avx2"}),
        ("fp asimd asimddp", {"neon", "neon_dot"}, {"avx2", "avx_vnni"}),
        (
            "fp asimd asimddp i8mm",
            {"neon", "neon_dot", "neon_i8mm"},
            {"avx2", "avx_vnni"},
        ),
    ),
)
def test_on_arm(flags, features, like, monkeypatch):
    monkeypatch.setattr(costs, "processor", lambda: {"Features": flags})
    assert costs._processor(None) == (None, None, features)
    assert costs._processor("neon") == (None, None, {"neon"})
    found = costs._machine.__wrapped__(None)
    assert found.processor.features == like
    assert found.name.endswith("since no ARM processor was measured")


# Whatever its class, a kernel from outside with a priority above zero is first; and one
# below zero is last.
def test_kernels_from_outside(monkeypatch):
    monkeypatch.setattr(table, "_table", list(table._table))

    def register(name, format, priority):
        def kernel(x, stored, problem):
            return (x @ problem.decode(stored).T).astype(x.dtype)

        kernel.__name__ = name
        eqq.register_kernel("matmul", format, priority=priority)(kernel)

    register("last", eqq.NF4, -1)
    assert chosen(eqq.NF4(), 4) != "last"
    register("of_any", eqq.AbstractFormat, 0.5)
    for format in (eqq.NF4(), Q4_K(), eqq.Nested(eqq.NF4(), scale=eqq.Int8(32))):
        assert chosen(format, 4) == "of_any"
    register("of_nf4", eqq.NF4, 1)
    assert chosen(eqq.NF4(), 4) == "of_nf4"


# What is traced again and again, as layers of a model, is looked up once.
@pytest.mark.skipif(hasattr(choose, "__wrapped__"), reason="types are checked")
def test_few_calls():
    choose(problem(eqq.NF4(), 4, (256, 512)))
    found = problem(eqq.NF4(), 4, (256, 512))
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    choose(found)
    sys.setprofile(None)
    assert calls < 60


def test_no_encoder_is_traced(monkeypatch):
    def encode(self, *args):
        raise AssertionError("An encoder is traced.")

    for cls in (eqq.NF4, eqq.Int8, eqq.Int, eqq.FP8):
        monkeypatch.setattr(cls, "to_codes", encode)
    for format in (eqq.NF4(96), eqq.Int8(96), eqq.Int(8, 96), eqq.FP8()):
        choose(problem(format, 3, (64, 96)))


def test_the_page_is_up_to_date():
    _, found, _ = parts()
    assert found.strip() == kernel_table().strip()
