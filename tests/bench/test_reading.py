import math

import pytest

from eqquant import bench
from eqquant.bench import _measure
from eqquant.bench._memory_rate import default_cycle, default_reading, Reading


_width = 2**14


def test_a_reading():
    reading = Reading(3 * 4 * _width + 1)
    assert reading.nbytes == 3 * 4 * _width
    assert Reading(0).nbytes == 4 * _width
    assert reading() is None
    assert reading.rate(bench.Times((0.5, 0.25, 1.0), (1.0,) * 3)) == 4 * reading.nbytes
    assert default_reading() >= max(2**30, default_cycle())


# In turn with products of one row, and with those only.
def test_when_memory_is_read(monkeypatch):
    made = []

    class Counted(Reading):
        def __init__(self, nbytes):
            Reading.__init__(self, nbytes)
            self.calls = 0
            made.append(self)

        def __call__(self):
            self.calls += 1
            Reading.__call__(self)

    monkeypatch.setattr(_measure, "Reading", Counted)
    rows = bench.measure([(32, 16)], [1, 2], ["int8"], budget=0, min_rounds=3, cycle=0)
    (reading,) = made
    # Until a turn settles, and then in it.
    assert reading.calls >= 2 * 3
    for row in rows:
        if row.rows == 1:
            assert row.memory == rows[0].memory > 0
            nbytes = row.bits_per_weight / 8 * 32 * 16
            share = nbytes / row.times.median / row.memory
            assert row.bandwidth == pytest.approx(share)
        else:
            assert math.isnan(row.memory) and math.isnan(row.bandwidth)
        assert len(row.times.seconds) == 3
