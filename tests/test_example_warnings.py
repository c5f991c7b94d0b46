import equinox as eqx
import jax.random as jr
import pytest
from jaxtyping import Array

import eqquant as eqq

from .test_example import conv_net, llama, normal


def test_warning():
    model, x = llama()
    with pytest.warns(UserWarning, match="Nothing is quantized.*`example=`"):
        eqq.tree_quantize(model)
    net, _ = conv_net()
    big = eqx.tree_at(lambda m: m.head, net, eqx.nn.Linear(32, 32, key=jr.key(0)))
    with pytest.warns(UserWarning, match="Only .*% of the numbers"):
        eqq.tree_quantize(big)
    with pytest.warns(
        UserWarning, match="(?s)Nothing is quantized.*`weight`: the filter"
    ):
        eqq.tree_quantize(eqx.nn.Conv2d(16, 16, 3, key=jr.key(0)))
    eqq.tree_quantize(model, example=x)  # (No warning.)


def test_the_name_of_a_class_like_one_of_equinox():
    class Linear(eqx.Module):
        weight: Array

    with pytest.warns(UserWarning, match=f"{__name__}.Linear is not a known owner"):
        eqq.tree_quantize(Linear(normal(0, 32, 48)))
