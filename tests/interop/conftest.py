import os
import sys

import pytest

from . import windows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def _emulated():
    with pytest.MonkeyPatch.context() as patch:
        windows.emulate(patch)
        yield


@pytest.fixture
def like_windows():
    """A system whose files are like those of Windows."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/maps"):
        pytest.skip("which Linux can emulate")
    yield from _emulated()


@pytest.fixture(params=["here", "windows"])
def systems(request):
    """This system, and one whose files are like those of Windows."""
    if request.param == "windows":
        request.getfixturevalue("like_windows")
