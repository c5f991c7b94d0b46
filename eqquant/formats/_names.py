import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from ._base import AbstractFormat


def known_formats() -> dict[str, Callable[..., AbstractFormat]]:
    """Returns all formats by the lower-case names of their classes: the formats of this
    library and of the user. If names collide, the library's format wins."""
    found = {}
    todo: list[type[AbstractFormat]] = [AbstractFormat]
    while todo:
        cls = todo.pop(0)
        todo.extend(cls.__subclasses__())
        # (A name that begins with an underscore marks a part of another format.)
        hidden = cls.__name__.startswith(("Abstract", "_"))
        if not inspect.isabstract(cls) and not hidden:
            name, package = cls.__name__.lower(), __name__.split(".")[0]
            if name not in found or cls.__module__.split(".")[0] == package:
                found[name] = cls
    return found


def as_format(
    format: AbstractFormat | str | Any, argument: str = "format"
) -> AbstractFormat:
    """Returns a format, given itself, its name, or its Python expression. Errors are
    about `argument`."""
    if isinstance(format, AbstractFormat):
        return format
    known = known_formats()
    if isinstance(format, str):
        if re.fullmatch(r"\w+", format):
            return _by_name(format)()
        return _from_text(format)
    if isinstance(format, type) and issubclass(format, AbstractFormat):
        raise TypeError(
            f"`{argument}` should be a value, not a class. Got the class "
            f"{format.__name__}; write `{format.__name__}()`."
        )
    raise TypeError(
        f"`{argument}` should be a format such as `NF4(block_size=64)`, or the name of "
        f"one: {', '.join(sorted(known))}. Got {format!r}."
    )


def _by_name(name):
    known = known_formats()
    if name.lower() not in known:
        raise ValueError(
            f"Unknown format name {name!r}. The known names are "
            f"{', '.join(sorted(known))}."
        )
    return known[name.lower()]


# The modules that may precede a dtype and a format.
_of_dtypes = ("np", "jnp", "numpy", "jax.numpy", "ml_dtypes")
_of_formats = ("eqq", "eqquant", "eqq.formats", "eqquant.formats")


def _from_text(text):
    wanted = f"A format should be a name, or as in 'NF4(128)'. Got {text!r}"
    try:
        format = _value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as e:
        raise ValueError(f"{wanted}, which is not Python: {e.msg}.") from e
    except (TypeError, ValueError) as e:
        raise ValueError(f"{wanted}: {e}") from e
    if not isinstance(format, AbstractFormat):
        raise ValueError(f"{wanted}.")
    return format


def _value(node):
    # Evaluates only constants, dtypes and formats, so no other code can run.
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float):
            return -number
    if isinstance(node, ast.Call):
        module, _, name = ast.unparse(node.func).rpartition(".")
        if name == "dtype" and module in ("", *_of_dtypes) and len(node.args) == 1:
            return _value(node.args[0])
        if module in ("", *_of_formats) and all(word.arg for word in node.keywords):
            named = {str(word.arg): _value(word.value) for word in node.keywords}
            return _by_name(name)(*map(_value, node.args), **named)
    if isinstance(node, ast.Name | ast.Attribute):
        # The name of a dtype, such as `bfloat16`, or of a format.
        module, _, name = ast.unparse(node).rpartition(".")
        if module in ("", *_of_dtypes):
            return name
    raise ValueError(
        f"`{ast.unparse(node)}` is not a number, a text, a dtype or a format."
    )
