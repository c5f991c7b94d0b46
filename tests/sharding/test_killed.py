import os
import signal

import equinox as eqx
import orbax.checkpoint as ocp
import pytest

import eqquant as eqq

from ..interop.same import same
from .killed import make
from .processes import start


pytestmark = pytest.mark.processes


def _kill(how, folder):
    with start("tests.sharding.killed", how, folder) as process:
        try:
            assert process.wait(timeout=120) == -signal.SIGKILL
        finally:
            process.kill()


def test_file(tmp_path):
    _kill("eqquant", tmp_path)
    (left,) = set(os.listdir(tmp_path)) - {"model"}
    assert left.endswith(".tmp")
    assert same(eqq.load(tmp_path / "model"), make(0))
    eqq.save(tmp_path / "model", make(2))
    assert same(eqq.load(tmp_path / "model"), make(2))


def test_orbax(tmp_path):
    _kill("orbax", tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    like = eqx.filter_eval_shape(make, 0)
    restore = ocp.args.StandardRestore(like)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [0]
        assert same(manager.restore(0, args=restore), make(0))
        manager.save(1, args=ocp.args.StandardSave(make(2)))
        manager.wait_until_finished()
        assert same(manager.restore(1, args=restore), make(2))
