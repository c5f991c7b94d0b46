import pytest

from .loading import measured, write


pytestmark = pytest.mark.processes


# A skeleton takes no memory, and arrays are read one after another, also into stacks.
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_peak(kind, whole, tmp_path):
    write(tmp_path / "model.gguf", kind, 3e8)
    found = measured(tmp_path / "model.gguf", whole)
    assert found["packed"] > 250
    assert found["used"] < found["limit"]
