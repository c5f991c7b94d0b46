from typing import Any

from jax.sharding import NamedSharding, PartitionSpec


# The static fields of an array, apart from its formats, as JSON.


def spec_to_json(
    sharding: NamedSharding | PartitionSpec | None,
) -> list[Any] | None:
    """Returns the names of mesh axes in a declared sharding. Raises a `ValueError` if
    the sharding has more than names."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    names = [
        name
        for entry in spec.partitions
        for name in (entry if isinstance(entry, tuple) else (entry,))
    ]
    named = all(name is None or isinstance(name, str) for name in names)
    if not named or spec.unreduced or spec.reduced:
        raise ValueError(
            f"a sharding can be saved only by the names of its axes. Got {spec}; "
            "remove it, with `with_sharding(None)`."
        )
    return list(spec.partitions)


def spec_from_json(json: Any) -> Any:
    """The inverse of `spec_to_json`."""
    return None if json is None else PartitionSpec(*map(tuple_from_json, json))


def tuple_from_json(json: Any) -> Any:
    """Converts a list back to the tuple that JSON made a list of. Other values are
    returned unchanged."""
    return tuple(json) if isinstance(json, list) else json
