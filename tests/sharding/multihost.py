import json
import os
import pathlib
import sys
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

import eqquant as eqq

from .job import assert_same, make_adapted, make_mesh, put, train


# What `test_multihost.py` runs, in each of several processes.


def main(index, port, number, folder):
    jax.distributed.initialize(f"localhost:{port}", number, index)
    assert (jax.process_count(), len(jax.devices())) == (number, 8)
    mesh = make_mesh()
    model, spec = make_adapted(mesh)
    split = [layer.weight.base.stored["codes"] for layer in model.layers]
    assert not any(codes.is_fully_addressable for codes in split)
    loss, model = train(model, spec, mesh)

    saved = folder / f"{number}.safetensors"
    eqq.save(saved, model)
    assert_same(eqq.load(saved, like=model), model, tolerance=0)
    # Of one process.
    assert_same(eqq.load(folder / "1.safetensors", like=model), model, tolerance=1e-6)

    if index == 0:
        (folder / f"{number}.json").write_text(json.dumps(loss))

    spread = put(np.arange(8), mesh, P("data"))
    own_part_of_each(folder / "own", spread, index)
    failures(model, folder, index)
    if (folder / "1.orbax").exists():
        by_orbax(model, folder, number)


def by_orbax(model, folder, number):
    arrays = eqx.filter(model, eqx.is_array)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / f"{number}.orbax", arrays)
        other = checkpointer.restore(folder / "1.orbax", arrays)
    assert_same(other, arrays, tolerance=1e-6)


def own_part_of_each(path, spread, here):
    """Arrays that only the last process has, and that each has one of."""
    *_, device = jax.devices()
    last = SingleDeviceSharding(device)
    one = jax.make_array_from_callback((3,), last, lambda i: np.arange(3)[i], jnp.int32)
    tree = {"of the last": one, "of each": jnp.asarray([here, 7])}
    eqq.save(path, {**tree, "spread": spread})
    loaded = eqq.load(path)
    assert loaded["of the last"].tolist() == [0, 1, 2]
    assert loaded["of each"].tolist() == [0, 7]
    assert loaded["spread"].tolist() == list(range(8))
    if not one.is_fully_addressable:
        with pytest.raises(ValueError, match="`of the last` is on .* another process"):
            eqq.save(path, tree)


def failures(model, folder, index):
    path = folder / "kept" / "model.safetensors"
    if index == 0:
        path.parent.mkdir(exist_ok=True)
    eqq.save(path, model)
    before = path.read_bytes()

    def full(*args):
        raise OSError("the disk is full")

    # In the last process alone.
    last = index == jax.process_count() - 1
    with mock.patch(
        "eqquant.interop._own._write._write_part", full if last else _written
    ):
        with pytest.raises(OSError if last else RuntimeError):
            eqq.save(path, model)
    with pytest.raises(ValueError, match="the same in all processes"):
        eqq.save(path, [model, {"index": index}])
    with pytest.raises(FileNotFoundError if index == 0 else RuntimeError):
        eqq.save(folder / "none" / "model", model)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def _written(*args):
    pass


if __name__ == "__main__":
    index, port, number, folder = sys.argv[1:]
    main(int(index), int(port), int(number), pathlib.Path(folder))
