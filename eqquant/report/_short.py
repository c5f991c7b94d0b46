import wadler_lindig as wl


def short_bytes(nbytes: int) -> str:
    """A number of bytes, to three digits: `2.41 MB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    units = iter(("kB", "MB", "GB", "TB"))
    size, unit = float(nbytes), ""
    while float(f"{size:.3g}") >= 1000:
        size, unit = size / 1000, next(units)
    return f"{size:#.3g}".rstrip(".") + f" {unit}"


def short_array(shape: tuple[int, ...], dtype: str) -> str:
    """An array by its dtype and shape: `f32[512,784]`."""
    return wl.pformat(wl.array_summary(shape, dtype, kind=None))


def short_format(format: str) -> str:
    """A format by its arguments: `NF4(64)`."""
    return format.replace("(block_size=", "(")
