import jax
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqquant.train import adamw4bit, adamw8bit, lion8bit, muon8bit

from ..helpers import normal
from .meshes import kinds, mesh, put, run


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


elementwise = pytest.mark.parametrize("make", (adamw8bit, adamw4bit, lion8bit))


def arrays(state):
    leaves = [x for x in jtu.tree_leaves(state) if x.ndim > 0]
    assert len(leaves) > 0
    return leaves


# The last bit of a float decides how it is dithered, and is for compilers to choose. So
# codes may be those next to each other.
def assert_close(found, expected):
    pairs = zip(jtu.tree_leaves(found), jtu.tree_leaves(expected), strict=True)
    for x, y in pairs:
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype == np.uint32:
            # The bits of scales.
            x, y = x.view(np.float32), y.view(np.float32)
        if x.dtype == np.uint8:
            # One code in a byte, or two.
            x, y = x.astype(int), y.astype(int)
            near = lambda x, y: np.abs(x - y) <= 1
            halves = near(x // 16, y // 16) & near(x % 16, y % 16)
            assert np.all(near(x, y) | halves)
        else:
            assert np.mean(np.isclose(x, y, rtol=0.05, atol=1e-7)) > 0.95


def as_without(make, kind, shape, spec, min_size=100):
    """Two steps, one of them compiled, are those of one device, and moments stay where
    they are. Returns those, and what a step sends."""
    on = mesh(kind, 2, 4)
    w, g = normal(*shape), normal(*shape, seed=1)
    optimizer = make(1e-2, min_size=min_size)
    params, grads = {"w": put(w, on, *spec)}, {"w": put(g, on, *spec)}
    state = begun = optimizer.init(params)
    expected = optimizer.init({"w": w})
    for update in (optimizer.update, jax.jit(optimizer.update)):
        updates, state = update(grads, state, params)
        wanted, expected = optimizer.update({"w": g}, expected, {"w": w})
        assert_close((updates, state), (wanted, expected))
        for new, old in zip(arrays(state), arrays(begun), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
        if kind == "explicit":
            assert jax.typeof(updates["w"]) == jax.typeof(params["w"])
    return arrays(state), run(optimizer.update, grads, state, params)[1]


def split_in(arrays):
    return {a.size // a.addressable_shards[0].data.size for a in arrays}


@pytest.mark.examples(1)
@elementwise
@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("spec, shards", [(("a",), 2), ((("b", "a"),), 8)])
def test_split_along_the_first_axis(make, kind, spec, shards):
    moments, sent = as_without(make, kind, (64, 96), spec, min_size=100)
    assert split_in(moments) == {shards}
    # Each device has the moments of its own part.
    assert sent == {}


@pytest.mark.thorough
@elementwise
@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("spec, shards", [((None, "b"), 4), (("a", "b"), 8)])
def test_split_along_others(make, kind, spec, shards):
    moments, _ = as_without(make, kind, (64, 96), spec)
    assert split_in(moments) == {shards}


# Ten blocks are split in two at most, and nine are not split.
@pytest.mark.thorough
@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize(
    "shape, spec, shards", [((64, 40), ("b", "a"), 2), ((48, 48), ("a",), 1)]
)
def test_blocks_that_do_not_divide_the_shards(kind, shape, spec, shards):
    moments, _ = as_without(adamw8bit, kind, shape, spec)
    assert split_in(moments) == {shards}


# What is orthogonalized is the whole matrix.
@pytest.mark.examples(1)
@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("spec, shards", [(("a",), 2), (("a", "b"), 8)])
def test_momentum_of_matrices(kind, spec, shards):
    moments, _ = as_without(muon8bit, kind, (64, 96), spec)
    assert split_in(moments) == {shards}


@pytest.mark.examples(2)
@elementwise
@pytest.mark.parametrize("kind", kinds)
def test_moments_in_float32(make, kind):
    moments, sent = as_without(make, kind, (64, 96), ("a", "b"), min_size=10**6)
    assert split_in(moments) == {8}
    assert sent == {}


# What is read off types is known while this is compiled, too.
@pytest.mark.examples(1)
@elementwise
def test_compiled_on_an_explicit_mesh(make):
    on = mesh("explicit", 2, 4)
    params = {"w": put(normal(64, 96), on, "a", "b")}
    optimizer = make(1e-2, min_size=100)
    eager = optimizer.init(params)
    with jax.set_mesh(on):
        state = jax.jit(optimizer.init)(params)
        found = jax.jit(optimizer.update)(params, state, params)
    assert split_in(arrays(state)) == {8}
    assert_close(state, eager)
    assert_close(found, optimizer.update(params, eager, params))


# What was declared says nothing of where arrays are.
def test_moved_to_one_device():
    params = {"w": put(normal(64, 96), mesh("auto", 8), "a")}
    optimizer = adamw8bit(1e-2, min_size=100)
    expected = optimizer.update(params, optimizer.init(params), params)
    moved, state = jax.device_put((params, optimizer.init(params)), jax.devices()[3])
    assert_close(jax.jit(optimizer.update)(moved, state, moved), expected)


# Within `shard_map`, which checks what varies over the devices.
@pytest.mark.examples(1)
@elementwise
@pytest.mark.parametrize("axis_names", ({"a", "b"}, {"a"}))
def test_shard_map(make, axis_names):
    on = mesh("auto", 2, 4)
    optimizer = make(1e-2, min_size=100)
    w, g = normal(64, 96), normal(64, 96, seed=1)

    def steps(w, g):
        state = optimizer.init({"w": w})
        _, state = optimizer.update({"w": g}, state, {"w": w})
        updates, _ = optimizer.update({"w": g}, state, {"w": w})
        return updates["w"]

    # With parameters that are split, and with some that all devices have.
    for spec, first, second in ((P("a"), w[:32], w[32:]), (P(), w[:32], w[:32])):
        sharded = jax.shard_map(
            steps,
            mesh=on,
            in_specs=(spec, P("a")),
            out_specs=P("a"),
            axis_names=axis_names,
        )
        found = jax.jit(sharded)(w if spec == P("a") else first, g)
        alone = [steps(first, g[:32]), steps(second, g[32:])]
        assert_close(found, np.concatenate(alone))
