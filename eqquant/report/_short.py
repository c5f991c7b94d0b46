import wadler_lindig as wl


def short_bytes(nbytes: int) -> str:
    """A number of bytes, to three digits: `2.41 MB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        text = f"{size:#.3g}".rstrip(".")
        if float(text) < 1000:
            return f"{text} {unit}"
    return f"{size / 1000:.2f} TB"


def short_array(shape: tuple[int, ...], dtype: str) -> str:
    """An array by its dtype and shape: `f32[512,784]`."""
    return wl.pformat(wl.array_summary(shape, dtype, kind=None))


def short_format(format: str) -> str:
    """A format by its arguments: `NF4(64)`."""
    return format.replace("(block_size=", "(")
