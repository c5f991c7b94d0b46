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


# What a configuration says of the quantization of a model, and files that say it.
_sections = ("quantization_config", "quantization", "compression_config")
_descriptions = ("quantize_config.json", "quant_config.json")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration less what is about quantization."""
    return {key: value for key, value in config.items() if key not in _sections}


@contextlib.contextmanager
def replacing_model(
    path: pathlib.Path, is_folder: bool, config: dict[str, Any]
) -> Iterator[str]:
    """As `replacing`, gives the path of a temporary file, which becomes the model at
    `path`, and its configuration the one beside it.

    While several files change places, the old configuration is set aside under a name
    for which `open` refuses the model. So a process that is killed never leaves arrays
    under the configuration of others.

    **Arguments:**

    - `path`: of the file.
    - `is_folder`: whether its folder is to have this model alone: then another one in
        it, in several files with an index, is removed.
    - `config`: what the configuration says of the quantization. Of an existing
        configuration, entries about other things stay.

    **Raises:**

    A `ValueError` if the existing configuration or index cannot be read, or if the
    folder has parts of other models that would be read as this one.
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
    """Files in the folder of a model that are of the model before it. The index comes
    last: until then, it names those that are left."""
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
    # After a kill, it may still be set aside.
    found = {}
    for file in files:
        if file.is_file() and file.stat().st_size > 0:
            found |= parse(file.read_bytes(), repr(str(file)))
    return found


@contextlib.contextmanager
def _written(beside, config):
    # In the folder of `beside` even if that is a link, for it is moved.
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
