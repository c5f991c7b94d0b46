"""The signatures of Equinox modules, for the site.

Griffe reads sources, and does not know that a subclass of `equinox.Module` takes its
fields as arguments. Python does.
"""

import inspect
import sys

import griffe

import eqquant
import eqquant.bench
import eqquant.demo


# Some rooms are imported when one of their names is first used.
for _name in dir(eqquant):
    getattr(eqquant, _name)


class Signatures(griffe.Extension):
    """Gives classes without an `__init__` of their own the one that they have."""

    def on_class(self, *, cls, **kwargs):
        del kwargs
        module = sys.modules.get(cls.module.path)
        found = getattr(module, cls.name, None)
        if "__init__" in cls.members or not hasattr(found, "__dataclass_fields__"):
            return
        parameters = [
            griffe.Parameter(
                parameter.name,
                kind=griffe.ParameterKind(parameter.kind.description),
                default=_text(parameter.default),
            )
            for parameter in inspect.signature(found).parameters.values()
        ]
        self_ = griffe.Parameter("self", kind=griffe.ParameterKind.positional_only)
        signature = griffe.Parameters(self_, *parameters)
        cls.set_member("__init__", griffe.Function("__init__", parameters=signature))


def _text(default):
    if default is inspect.Parameter.empty:
        return None
    return default.__name__ if inspect.isclass(default) else repr(default)
