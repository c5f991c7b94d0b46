import json

import equinox as eqx
import orbax.checkpoint as ocp
import pytest

import eqquant as eqq

from .job import assert_same, make_adapted, make_mesh, train
from .processes import run_together


pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def alone():
    mesh = make_mesh()
    model, spec = make_adapted(mesh)
    loss, model = train(model, spec, mesh)
    return loss, model


# Orbax takes a second to begin with, in each process.
@pytest.mark.parametrize("number, with_orbax", ((2, True), (4, False)))
def test_processes_do_what_one_does(number, with_orbax, alone, tmp_path):
    loss, model = alone
    arrays = eqx.filter(model, eqx.is_array)
    eqq.save(tmp_path / "1.safetensors", model)
    if with_orbax:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "1.orbax", arrays)

    run_together("tests.sharding.multihost", number, tmp_path)

    found = json.loads((tmp_path / f"{number}.json").read_text())
    assert found == pytest.approx(loss, abs=1e-5)
    loaded = eqq.load(tmp_path / f"{number}.safetensors", like=model)
    assert_same(loaded, model, tolerance=1e-6)
    if with_orbax:
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / f"{number}.orbax", arrays)
        assert_same(restored, eqx.filter(loaded, eqx.is_array), tolerance=0)
