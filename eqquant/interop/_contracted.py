from .._product import Axis


# An axis with fewer numbers is taken for that of the window of a convolution.
few = 16


def contracted_by_shape(shape: tuple[int, ...]) -> Axis | None:
    """The axes that products contract of an array in a file, where only its shape is
    known: the last one of `(out, in)` matrices and of a stack of them, and all but the
    first of the filter of a convolution, `(out, in, *window)`. `None` for four axes or
    more of which the last is no window, as these may be either."""
    if len(shape) > 2 and shape[-1] < few:
        return tuple(range(1 - len(shape), 0))
    return -1 if len(shape) < 4 else None
