import math
import pathlib


_least = 256 << 20


def last_level_cache() -> int | None:
    """The size in bytes of the largest cache of this machine, where that is known."""
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = path.read_text().strip()
        sizes.append(int(number.removesuffix("K")) << 10)
    return max(sizes, default=None)


def default_cycle() -> int:
    """How many bytes of weights to go through before one comes again: four times what
    the caches hold, and 256 MB at least."""
    return max(_least, 4 * (last_level_cache() or 0))


def default_reading() -> int:
    """How many bytes to read to find how fast memory is."""
    return max(1 << 30, default_cycle())


def number_of_copies(nbytes: int, cycle: int) -> int:
    return min(1024, max(1, math.ceil(cycle / max(1, nbytes))))
