import os
import pathlib
import signal
import sys
from unittest import mock

import orbax.checkpoint as ocp

import eqquant as eqq

from ..helpers import normal


# What `test_killed.py` runs: a process that dies while it saves for the second time.


def make(seed):
    return {
        "w": eqq.quantize(normal(64, 64, seed=seed), "nf4"),
        "x": normal(64, seed=seed),
    }


def by_eqquant(folder):
    eqq.save(folder / "model", make(0))
    with mock.patch("eqquant.interop._own._write._write_part", _half):
        eqq.save(folder / "model", make(1))


def by_orbax(folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=ocp.args.StandardSave(make(0)))
        manager.wait_until_finished()
        # All is written, and then it would get its name.
        with mock.patch("os.rename", _die), mock.patch("os.replace", _die):
            manager.save(1, args=ocp.args.StandardSave(make(1)))
            manager.wait_until_finished()


def _half(file, offset, shape, index, part):
    file.seek(offset)
    file.write(part.tobytes()[: part.nbytes // 2])
    file.flush()
    _die()


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    how, folder = sys.argv[1:]
    {"eqquant": by_eqquant, "orbax": by_orbax}[how](pathlib.Path(folder))
