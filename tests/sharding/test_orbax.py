import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import main_formats, normal
from ..interop.same import same


# Orbax is used as for any other model: a quantized one is a PyTree of arrays.


one = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
other = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"))


def _placed(tree, mesh, **specs):
    def place(name, q):
        return q.with_sharding(NamedSharding(mesh, specs[name]))

    return {name: place(name, q) for name, q in tree.items()}


def _restored(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


@pytest.mark.examples(1)
@main_formats
def test_to_another_mesh(format, tmp_path):
    def make():
        return {
            "matrix": eqq.quantize(normal(12, 70), format, axis=-1, activation="int8"),
            "stack": eqq.quantize(normal(2, 70, 12), format),
        }

    made = make()
    first = _placed(made, one, matrix=P("a"), stack=P("b", None, "a"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", first)

    specs = {"matrix": P(("y", "x")), "stack": P("x", None, "y")}
    second = _placed(made, other, **specs)
    # No array is made for it.
    like = _placed(eqx.filter_eval_shape(make), other, **specs)
    restored = _restored(tmp_path / "checkpoint", like)
    assert same(restored, second)
    for name, q in restored.items():
        assert q.placement == second[name].placement
        assert q.placement.spec == q.sharding.spec


def make_model():
    mlp = eqx.nn.MLP(32, 32, 32, 1, key=jr.key(0))
    return eqq.tree_quantize(mlp, eqq.NF4(16), min_size=0)


def test_a_loop_with_a_manager(tmp_path):
    model = make_model()
    optimizer = optax.adamw(0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all")
    def step(model, state):
        loss = lambda model: jnp.sum(model(jnp.ones(32)))
        gradient = eqx.filter_grad(loss)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(gradient, state, params)
        return eqx.apply_updates(model, updates), state

    kept = []
    with (
        jax.numpy_dtype_promotion("standard"),
        ocp.CheckpointManager(tmp_path) as manager,
    ):
        for i in range(3):
            model, state = step(model, state)
            arrays = eqx.filter((model, state), eqx.is_array)
            kept.append(jtu.tree_map(np.array, arrays))
            # It is written while the next step overwrites what it was made of.
            manager.save(i, args=ocp.args.StandardSave(arrays))
    biases = [np.asarray(arrays[0].layers[0].bias) for arrays in kept]
    assert not np.array_equal(biases[1], biases[2])

    skeleton = eqx.filter_eval_shape(lambda: (make_model(), state))
    like, rest = eqx.partition(skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    with ocp.CheckpointManager(tmp_path) as manager:
        for i in manager.all_steps():
            restored = manager.restore(i, args=ocp.args.StandardRestore(like))
            assert same(jtu.tree_map(np.asarray, restored), kept[i])
    model, _ = eqx.combine(restored, rest)
    assert same(model.layers[0].weight, make_model().layers[0].weight)
    assert model(normal(32)).shape == (32,)
