"""Rules heed all parameters of their primitives. What has another becomes dense."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._implicit._moves import moves_of
from eqquant._implicit._table import _rules, heeds, rules_of

from ..helpers import normal
from .same import assert_same


@jax.custom_jvp
def with_jvp(w):
    return 2 * w


@jax.custom_vjp
def with_vjp(w):
    return 2 * w


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
with_vjp.defvjp(lambda w: (w, None), lambda _, ct: (ct,))

mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
ids = np.array([1, 0], np.int32)


def varying(w):
    fn = lambda w: lax.pcast(w, "a", to="varying")
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P("a"))(w)


def ragged(w):
    return lax.ragged_dot(w[0], w, np.array([1, 2, 1], np.int32))


# Of a stack of three matrices, with four rows and columns.
examples = {
    "broadcast_in_dim": lambda w: lax.broadcast_in_dim(w, (2, 3, 4, 4), (1, 2, 3)),
    "concatenate": lambda w: lax.concatenate([w, w], 0),
    "cond": lambda w: lax.cond(ids[0] > 0, lambda w: w, lambda w: w[::-1], w),
    "conv_general_dilated": lambda w: lax.conv(w[:1], w, (1,), "SAME"),
    "convert_element_type": lambda w: lax.convert_element_type(w, jnp.bfloat16),
    "copy": jnp.copy,
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "div": lambda w: w / 2,
    "dot_general": lambda w: w @ w,
    "dynamic_slice": lambda w: lax.dynamic_slice(w, (*ids, 0), (1, 4, 4)),
    "dynamic_update_slice": lambda w: lax.dynamic_update_slice(w, w[:1], (*ids, 0)),
    "gather": lambda w: w[ids],
    "jit": lambda w: jax.jit(lambda w: w[0])(w),
    "mul": lambda w: 2 * w,
    "name": lambda w: checkpoint_name(w, "w"),
    "neg": lambda w: -w,
    "optimization_barrier": lax.optimization_barrier,
    "pvary": varying,
    "ragged_dot_general": ragged,
    "remat2": jax.checkpoint(lambda w: 2 * w),
    "reshape": lambda w: w.reshape(12, 4),
    "rev": lambda w: lax.rev(w, (0,)),
    "scan": lambda w: lax.scan(lambda c, w: (c, w), 0, w)[1],
    "scatter": lambda w: w.at[ids].set(1),
    "shard_map": varying,
    "sharding_constraint": lambda w: lax.with_sharding_constraint(
        w, NamedSharding(mesh, P())
    ),
    "slice": lambda w: w[1:, ::2],
    "split": lambda w: jnp.split(w, 3),
    "squeeze": lambda w: lax.squeeze(w[:1], (0,)),
    "stack": lambda w: jnp.stack([w, w]),
    "stop_gradient": lax.stop_gradient,
    "transpose": lambda w: w.mT,
    "unstack": jnp.unstack,
    "while": lambda w: lax.while_loop(lambda w: False, lambda w: w, w),
}
# What JAX makes of derivatives, in some versions.
derived = {"closed_call"}
# Whose rules are those for packed arrays, applied to skeletons.
of_skeletons = "eqquant.train._qat._rules"


def equations(jaxpr):
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, ClosedJaxpr | type(jaxpr)):
                    yield from equations(inner)


def equation(name, fn):
    found = equations(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((3, 4, 4), "float32")))
    return next(eqn for eqn in found if eqn.primitive.name == name)


def test_every_rule_has_an_example():
    ours = {
        name
        for name, entries in _rules.items()
        for entry in entries
        if entry.rule.__module__.startswith("eqquant.")
        and entry.rule.__module__ != of_skeletons
        and "register_rule" not in entry.rule.__qualname__
    }
    assert ours - derived == set(examples)


@pytest.mark.parametrize("name", examples)
def test_parameters(name):
    eqn = equation(name, examples[name])
    entries = [entry for entry in _rules[name] if entry.parameters is not None]
    for entry in entries:
        assert heeds(entry.parameters, eqn), (name, [*eqn.params])
    # A rule is for no equation that has one that it does not know.
    new = eqn.replace(params=eqn.params | {"of_a_newer_version": 1})
    assert not set(rules_of(new)) & {entry.rule for entry in entries}
    before, after = (moves_of(e, 0, e.invars) for e in (eqn, new))
    if entries and any(before):
        assert not any(after)


# Parameters that say to compute something else, or in another way.
others = {
    "apply": lambda w: w.at[1].apply(jnp.tanh),
    "out_dtype": lambda w: lax.mul(w, np.float32(2), out_dtype=jnp.bfloat16),
    "dimensions": lambda w: lax.reshape(w, (4, 12), (2, 0, 1)),
    "algorithm": lambda w: lax.dot(
        w[0], w[0], precision=lax.DotAlgorithmPreset.F32_F32_F32
    ),
    "preferred": lambda w: lax.dot(w[0], w[0], preferred_element_type=jnp.bfloat16),
}


@pytest.mark.parametrize("writable", (False, True))
def test_other_values(writable):
    q = eqq.quantize(normal(3, 4, 4), "int8", axis=-1, writable=writable)
    fn = lambda w: {name: fn(w) for name, fn in others.items()}
    found = assert_same(fn, q, tolerance=1e-6)
    assert not any(map(eqq.is_quantized, found.values()))
