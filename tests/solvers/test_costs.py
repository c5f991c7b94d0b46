import pytest

from .costs import memory_above_the_call


@pytest.mark.thorough
@pytest.mark.optimized
def test_memory_of_calibration():
    assert memory_above_the_call() <= 1
