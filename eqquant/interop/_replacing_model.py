import contextlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from ._containers import index_suffix, parse, read_index, set_aside_path
from ._files import remove, replace, sync
from ._replacing import make_folder, replacing, temporary_path


# The sections of a configuration about quantization, and files about it.
_sections = ("quantization_config", "quantization", "compression_config")
_descriptions = ("quantize_config.json", "quant_config.json")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without its sections about quantization."""
    return {key: value for key, value in config.items() if key not in _sections}


@contextlib.contextmanager
def replacing_model(
    path: pathlib.Path, is_folder: bool, config: dict[str, Any]
) -> Iterator[str]:
    """Like `replacing`, yields the path of a temporary file, which becomes the model at
    `path`. Also updates the configuration next to it.

    While several files change places, the old configuration is set aside under a name
    that makes `open` refuse the model. So a killed process never leaves arrays next to
    the configuration of other arrays. Raises a `ValueError` if the existing
    configuration or index cannot be read, or if the folder has parts of other models
    that would be read as this one.

    - `path`: the path of the file.
    - `is_folder`: whether its folder is for this model alone. If so, another model in
        it, in several files with an index, is removed.
    - `config`: the sections about quantization. Other entries of an existing
        configuration are kept.
    """
    own = path.with_name(f"{path.stem}.config.json")
    beside = path.with_name("config.json") if is_folder else own
    aside = set_aside_path(beside)
    stale = _other_files(path, own) if is_folder else []
    config = without_quantization(_existing(aside, beside, own)) | config
    make_folder(path)
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(_written(beside, config)) if config else None
        was_aside = aside.is_file()
        try:
            with replacing(path, secrets.token_hex(4)) as temporary:
                yield temporary
                sync(temporary)
                if config or stale or os.path.lexists(beside):
                    _set_aside(beside, aside)
        except BaseException:
            # The model is still the old one.
            if aside.is_file() and not was_aside:
                _put_back(beside, aside)
            raise
        for file in stale:
            remove(file)
        if text is not None:
            replace(text, beside)
        aside.unlink(missing_ok=True)


def _other_files(path, own):
    """Returns the files of the previous model in a folder. The index comes last: until
    it is removed, it names the files that are left."""
    folder = path.parent
    index = folder / f"model{index_suffix}"
    named = set(read_index(index)[0].values()) if index.is_file() else set()
    others = [
        *(x for x in sorted(folder.glob(f"*{index_suffix}")) if x != index),
        *(x for x in sorted(folder.glob("model-*.safetensors")) if x.name not in named),
    ]
    if others:
        raise ValueError(
            f"{str(folder)!r} has {', '.join(repr(x.name) for x in others)}, which "
            f"{index.name!r} does not name: other libraries would open them, too. Move "
            "them, or choose another folder."
        )
    names = (*sorted(named), *_descriptions, own.name, index.name)
    stale = [folder / name for name in names]
    return [x for x in stale if x != path and os.path.lexists(x)]


def _existing(*files):
    # If an earlier process was killed, the configuration may still be set aside.
    found = {}
    for file in files:
        if file.is_file() and file.stat().st_size > 0:
            found |= parse(file.read_bytes(), repr(str(file)))
    return found


@contextlib.contextmanager
def _written(beside, config):
    # Write to the folder of `beside` even if that is a link, because the file is
    # renamed there.
    temporary = temporary_path(beside.parent / "config", secrets.token_hex(4))
    try:
        pathlib.Path(temporary).write_bytes(json.dumps(config, indent=2).encode())
        sync(temporary)
        if beside.is_file():
            shutil.copymode(beside, temporary)
        yield temporary
    finally:
        remove(temporary)


def _set_aside(beside, aside):
    if os.path.lexists(beside):
        replace(beside, aside)
    else:
        aside.touch()


def _put_back(beside, aside):
    if aside.stat().st_size == 0:
        aside.unlink()
    else:
        replace(aside, beside)
