"""Keys, attributes and nodes of all kinds, to files and back."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.interop import load, save

from ..helpers import normal
from .same import same


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys(implementation, path):
    key = jr.key(7, impl=implementation)
    data = np.asarray(jr.key_data(key))
    many = jr.wrap_key_data(jnp.asarray([[data, data + 1]]), impl=implementation)
    tree = {"one": key, "many": many, "raw": jnp.asarray(data)}
    save(path, tree)
    assert same(load(path), tree)
    assert same(load(path, like=jax.eval_shape(lambda: tree)), tree)


def test_key_of_another_implementation_is_kept(path):
    save(path, jr.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"expected key<fry>\[\], got key<rbg>\[\]"):
        load(path, like=jr.key(0))


def test_attributes_and_sequences(path):
    Pair = collections.namedtuple("Pair", ["left", "right"])
    x = jnp.arange(3)
    tree = {
        "linear": eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(0)),
        "dropout": eqx.nn.Dropout(0.25),
        "identity": eqx.nn.Identity(),
        "pair": Pair(x, 1),
        "tuple": ((), x, [jax.nn.relu, None, True]),
        "functions": {"f": jax.nn.relu, "object": object(), "text": "text"},
    }
    save(path, tree)
    assert same(
        load(path),
        {
            "linear": {"weight": tree["linear"].weight, "bias": None},
            "dropout": {"p": 0.25, "inference": False},
            "identity": {},
            "pair": {"left": x, "right": 1},
            "tuple": [[], x, [None, None, True]],
            "functions": {},
        },
    )


def test_keys_that_cannot_be_sorted(path):
    x = jnp.arange(3)
    tree = collections.OrderedDict([("b", x), (1, 2), ((0, "a"), 3.5)])
    save(path, tree)
    loaded = load(path)
    assert type(loaded) is dict
    assert list(loaded.items())[1:] == [(1, 2), ((0, "a"), 3.5)]
    assert same(loaded["b"], x)
    assert same(load(path, like=tree), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {0: 1, 2: 3},
        {True: 1, False: 2},
        {-0.5: 1, float("inf"): 2},
        {("a", 0): 1, ("a", 1): {(): 2}},
        {None: 1},
        {"a.b": normal(1), "a": {"b": normal(1, seed=1)}, "a.b#2": normal(1, seed=2)},
        {"__metadata__": normal(1), "": normal(1, seed=1), "\x00é\n\"'": normal(2)},
        {"w": eqq.quantize(normal(16, 2), "int8"), "w.codes": normal(1)},
        {"": {"": normal(1)}, ".": normal(1, seed=1)},
        normal(3),
        1.5,
        None,
        [],
        eqq.quantize(normal(16, 2), "int8"),
    ],
)
def test_odd_keys_and_roots(tree, path):
    save(path, tree)
    assert same(load(path), tree)
    assert tree is None or same(load(path, like=tree), tree)


def test_nodes_that_a_user_registered(path):
    @jtu.register_pytree_node_class
    class Unnamed:
        def __init__(self, *children):
            self.children = children

        def tree_flatten(self):
            return self.children, None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children)

    tree = Unnamed(normal(2), [3], None)
    save(path, tree)
    assert same(load(path), [normal(2), [3], None])
    assert same(load(path, like=tree), tree)


def test_nodes_whose_leaves_are_made_anew(path):
    @jtu.register_pytree_node_class
    class Key:
        def __init__(self, number):
            self.number = number

        def tree_flatten(self):
            data = np.array([0, self.number], np.uint32)
            return (jr.wrap_key_data(jnp.asarray(data)),), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(0)

    save(path, list(map(Key, range(20))))
    assert [int(jr.key_data(key)[1]) for (key,) in load(path)] == list(range(20))
