import re
from collections import Counter


_typed = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ([a-z]\w*)\[")
_product = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = ([a-z]\w*)\[\S* (dot|convolution|ragged-dot)\((.*?)\)"
)
_operand = re.compile(r"%?([\w.\-]+)\s*(?:,|$)")


def product_dtypes(text: str) -> dict[str, int]:
    """The dtypes of the products of a compiled program, `"s8 x s8 -> s32"`, and how
    many of each there are: those that XLA has itself, not those within kernels.

    **Arguments:**

    - `text`: the program, as `compiled.as_text()` gives it.
    """
    lines = text.splitlines()
    dtypes: dict[str, str] = {}
    for match in filter(None, map(_typed.match, lines)):
        dtypes[match[1]] = match[2]
    found = Counter()
    for match in filter(None, map(_product.match, lines)):
        names = [name for name in _operand.findall(match[3]) if name in dtypes]
        found[f"{' x '.join(dtypes[name] for name in names)} -> {match[1]}"] += 1
    return dict(found)
