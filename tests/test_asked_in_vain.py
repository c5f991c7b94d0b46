"""A filter that asks for a format where nothing can be quantized is an error; so is no
filter that leaves out what it does not name."""

import functools as ft
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import jaxtyping
import pytest

import eqquant as eqq
from eqquant import Rules
from eqquant.train import tree_compute, tree_fake_quantize

from .helpers import check_warned_here, normal


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    stack: list[eqx.nn.Conv2d]
    weighted: eqx.nn.WeightNorm
    norm: eqx.nn.LayerNorm
    activation: eqx.nn.PReLU
    state: eqx.nn.StateIndex
    out: eqx.nn.Linear

    def __init__(self):
        key = jr.key(0)
        self.conv = eqx.nn.Conv2d(4, 4, 3, key=key)
        self.stack = [eqx.nn.Conv2d(4, 4, 3, key=key) for _ in range(2)]
        self.weighted = eqx.nn.WeightNorm(eqx.nn.Linear(4, 4, key=key))
        self.norm = eqx.nn.LayerNorm((4, 4))
        self.activation = eqx.nn.PReLU(jnp.ones((4, 4)))
        self.state = eqx.nn.StateIndex(jnp.ones((4, 4)))
        self.out = eqx.nn.Linear(64, 64, key=key)

    def __call__(self, x):
        return self.out(jnp.mean(self.conv(x), (1, 2)))


net = Net()
quantize = (eqq.tree_quantize, tree_fake_quantize, tree_compute)
all_functions = pytest.mark.parametrize("fn", quantize, ids=lambda fn: fn.__name__)


def number(model):
    stands = lambda x: hasattr(x, "dequantize")
    return sum(map(stands, jtu.tree_leaves(model, is_leaf=stands)))


def prefix(where, value: str | eqq.AbstractFormat = "int8"):
    nothing = jtu.tree_map(lambda _: None, net)
    return eqx.tree_at(where, nothing, value, is_leaf=lambda x: x is None)


in_vain = {
    "a path": (Rules([("conv.weight", "int8"), ("*", None)]), "the filter of a conv"),
    "a layer": (Rules([("conv.*", "int8"), ("*", "int8")]), "the filter of a conv"),
    "some layers": (Rules([("stack.*.weight", True)]), "`stack.1.weight`: the filter"),
    "a function": (
        Rules([(lambda i: i.field == "bias", "int8")]),
        "`conv.bias`: a bias",
    ),
    "a bias": (Rules([("*.bias", "int8")]), "and 3 more"),
    "a norm": (Rules([("norm.weight", "int8")]), "a parameter of a LayerNorm"),
    "slopes": (Rules([("activation*", "int8")]), "a parameter of a PReLU"),
    "a state": (Rules([("state*", "int8")]), "a state"),
    "reparametrised": (Rules([("weighted.layer.*", "int8")]), "by a WeightNorm"),
    "a place": (prefix(lambda m: m.conv.weight), "`conv.weight`: the filter of a"),
    "a place of a layer": (
        prefix(lambda m: m.conv, eqq.Int8()),
        "`conv.weight`: the filter of a convolution",
    ),
}


@all_functions
@pytest.mark.parametrize("name", in_vain)
@pytest.mark.filterwarnings("ignore:.*How the model uses these matrices:UserWarning")
def test_is_an_error(name, fn):
    spec, text = in_vain[name]
    with pytest.raises(ValueError, match="nothing can be quantized") as error:
        fn(net, spec)
    assert text in str(error.value)
    with pytest.warns(UserWarning, match="nothing can be quantized") as caught:
        model = fn(net, spec, strict=False)
    assert number(model) == (name == "a layer")
    messages = [w for w in caught if "nothing can be quantized" in str(w.message)]
    assert len(messages) == 1
    check_warned_here(messages[0], __file__)
    ways = "`unsupported='on_call'`" in text_of(error), "`example=`" in text_of(error)
    use = "filter" in text or "WeightNorm" in text
    assert ways == (use, use)
    # Which is silent, and says why by itself.
    eqq.report(net, filter_spec=spec)


def text_of(error):
    return str(error.value)


honoured = {
    "every weight": (Rules([("*", "int8")]), 1),
    "the rest": (Rules([("out.*", "int8"), ("**", "nf4")]), 1),
    "what an earlier rule decides": (Rules([("*.weight", True), ("out*", "nf4")]), 1),
    "what an earlier rule leaves": (Rules([("*", None), ("conv.weight", "int8")]), 0),
    "one of several": (Rules([("[co]*.weight", "int8")]), 1),
    "a mask": (jtu.tree_map(eqx.is_inexact_array, net), 1),
    "a function": (lambda x: "int8" if eqx.is_array(x) and x.ndim > 1 else None, 1),
    "what is small": (prefix(lambda m: m.out, "int8"), 1),
}


@all_functions
@pytest.mark.parametrize("name", honoured)
def test_is_honoured(name, fn):
    spec, quantized = honoured[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fn(net, spec)
    assert number(model) == quantized
    if fn is eqq.tree_quantize:
        # Of a model that is quantized already, too.
        assert number(fn(model, spec)) == quantized


def test_small_layers_may_be_left():
    tree = {"small": eqx.nn.Linear(4, 4, key=jr.key(0)), "out": net.out}
    model = eqq.tree_quantize(tree, {"small": "int8", "out": "int8"})
    assert number(model) == 1


@pytest.mark.parametrize("fn", (eqq.tree_quantize, tree_fake_quantize))
@pytest.mark.parametrize("kwargs", ({"unsupported": "on_call"}, {"example": None}))
def test_the_remedies(kwargs, fn):
    x = normal(64, 5, 5)
    conv = eqx.nn.Conv2d(64, 64, 3, key=jr.key(0))
    model = Small(conv, net.out)
    kwargs = {"example": x} if "example" in kwargs else kwargs
    found = fn(model, Rules([("conv.weight", "int8")]), **kwargs)
    assert number(found) == 1 and hasattr(found.conv.weight, "dequantize")
    y, expected = eqx.filter_jit(found)(x), eqx.filter_jit(model)(x)
    assert jnp.max(jnp.abs(y - expected)) < 0.01 * jnp.max(jnp.abs(expected))


class Small(eqx.Module):
    conv: eqx.nn.Conv2d
    out: eqx.nn.Linear

    def __call__(self, x):
        return self.out(jnp.mean(jax.nn.relu(self.conv(x)), (1, 2)))


@pytest.mark.parametrize("fn", (tree_fake_quantize, tree_compute))
def test_training_warns_of_what_stays_dense(fn):
    model = Small(eqx.nn.Conv2d(64, 64, 3, key=jr.key(0)), net.out)
    for spec in (True, Rules([("*", "int8")])):
        with pytest.warns(UserWarning, match="Only 10% .*\n- `conv.weight`") as caught:
            assert number(fn(model, spec)) == 1
        assert "`example=`" in str(caught[0].message)
        check_warned_here(caught[0], __file__)


# What stands for a weight is trained first, and then packed; or has a quantized base.
def test_weights_in_training():
    linear = eqx.nn.Linear(64, 64, key=jr.key(0))
    lora = ft.partial(eqq.train.lora, rank=2, key=jr.key(1))
    for model, text in (
        (lora(linear)[0], "`weight.base`: the base of an adapter.*before `lora`"),
        (tree_fake_quantize(linear), "stored in NF4().*`train.tree_freeze`"),
        (tree_compute(linear, "int8"), "computed in Int8().*`train.tree_freeze`"),
    ):
        text = rf"Nothing is quantized:\n.*{text.replace('()', '..')}"
        with pytest.warns(UserWarning, match=text) as caught:
            same = eqq.tree_quantize(model)
        check_warned_here(caught[0], __file__)
        assert eqx.tree_equal(same, model)
    adapted, _ = lora(eqq.tree_quantize(linear))
    assert eqx.tree_equal(eqq.tree_quantize(adapted), adapted)
    with pytest.raises(ValueError, match="(?s)selects none.*`train.tree_freeze` packs"):
        lora(tree_fake_quantize(linear))


@all_functions
def test_unsupported_layers_may_be_errors(fn):
    with pytest.raises(ValueError, match="pass 'skip' or 'on_call' for `unsupported`"):
        fn(net, "int8", unsupported="error")
    # (Type checkers find this, too.)
    wrong = (ValueError, jaxtyping.TypeCheckError)
    with pytest.raises(wrong, match="unsupported"):
        fn(net, "int8", unsupported="dense")


def test_lora_names_a_bias():
    rules = Rules([("conv.bias", True), ("out.weight", True)])
    with pytest.raises(ValueError, match="`conv.bias`: a bias"):
        eqq.train.lora(net, 2, rules, key=jr.key(0))


# What is quantized already stays in its format: to ask for another is in vain.
def test_another_format():
    model = eqq.tree_quantize({"a": normal(64, 64), "b": normal(64, 64)}, "nf4")
    for spec in (
        eqq.Rules([("a", "int8"), ("*", None)]),
        {"a": "int8", "b": None},
    ):
        with pytest.raises(ValueError, match="(?s)`a`: quantized.*tree_dequantize"):
            eqq.tree_quantize(model, spec)
        with pytest.warns(UserWarning, match="where nothing can be quantized"):
            eqq.tree_quantize(model, spec, strict=False)
    for spec in (
        eqq.Rules([("a", "nf4"), ("*", None)]),
        eqq.Rules([("*", "int8")]),
        {"a": eqq.NF4(), "b": None},
        "int8",
    ):
        assert eqq.tree_quantize(model, spec)["a"].format == eqq.NF4()


# A function is asked of what no earlier rule has taken, and no one asks for vectors.
def test_ordinary_filters():
    model = {"h": eqx.nn.Linear(64, 64, key=jr.key(0)), "s": jnp.ones(())}
    rules = Rules([("s", None), (lambda info: info.shape[0] > 1, eqq.NF4())])
    assert eqq.is_quantized(eqq.tree_quantize(model, rules)["h"].weight)
    each = jtu.tree_map(lambda x: eqq.NF4() if eqx.is_array(x) else None, model)
    assert eqq.is_quantized(eqq.tree_quantize(model, each)["h"].weight)
    norm = {"a": model["h"], "norm": eqx.nn.LayerNorm(64)}
    spec = {"a": "nf4", "norm": "nf4"}
    assert eqq.is_quantized(eqq.tree_quantize(norm, spec)["a"].weight)
