from .._product import Axis


# If the last axis is shorter than this, it is assumed to be the window of a
# convolution.
few = 16


def contracted_by_shape(shape: tuple[int, ...]) -> Axis | None:
    """Guesses the axes that products contract from the shape of an array in a file: the
    last axis for `(out, in)` matrices and stacks of them, and all axes but the first
    for the filter of a convolution, `(out, in, *window)`. Returns `None` for four axes
    or more without a window, which may be either."""
    if len(shape) > 2 and shape[-1] < few:
        return tuple(range(1 - len(shape), 0))
    return -1 if len(shape) < 4 else None
