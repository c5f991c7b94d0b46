import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors

from ._containers import index_suffix, main_file, read_index
from ._header import damaged


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """A file of safetensors; or those of a folder, or of an index, as if they were one:
    with `metadata`, `keys` and `get_slice`.

    **Raises:**

    A `ValueError` if it is none.
    """
    where = pathlib.Path(path)
    if where.is_dir():
        where, *others = main_file(where)
        if others:
            names = ", ".join(repr(path.name) for path in (where, *others))
            raise ValueError(f"it has several files, and no index: {names}.")
    if not where.name.endswith(index_suffix):
        with _opened_file(os.fspath(where)) as file:
            yield file
        return
    index, metadata = read_index(where)
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(_opened_file(os.fspath(where.with_name(name))))
            for name in sorted(set(index.values()))
        }
        yield _Together(metadata, index, files)


class _Together:
    def __init__(
        self,
        metadata: dict[str, str],
        index: Mapping[str, str],
        files: Mapping[str, Any],
    ):
        self._metadata = metadata
        self._files = {}
        for name, file in files.items():
            for key in file.keys():
                if index.get(key) != name:
                    raise damaged(
                        "its index is not of its files",
                        f"{key!r} is in {name!r}, and not in {index.get(key)!r}",
                    )
                self._files[key] = file

    def metadata(self) -> dict[str, str]:
        return self._metadata

    def keys(self) -> list[str]:
        return list(self._files)

    def get_slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)


@contextlib.contextmanager
def _opened_file(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        start = file.read(9)
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as e:
        # The size of the header comes first, in eight bytes, and then its JSON.
        if start[8:] == b"{":
            raise damaged("it is cut short, or its header is damaged", e) from e
        raise ValueError(
            "it is not a safetensors file, as `eqquant.save` writes, or only the "
            f"beginning of one ({e}). Is it the right file, and all of it?"
        ) from e
    with file:
        yield file
