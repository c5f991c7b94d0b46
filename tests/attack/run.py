import collections
import pathlib
import time
import traceback
from collections.abc import Callable

import jax

from .case import Case
from .einsums import einsums
from .extremes import extremes
from .folders import folders
from .long_sums import long_sums
from .optimizers import optimizers
from .products import products
from .programs import programs
from .round_trips import round_trips
from .saved import saved
from .sharding import manual, sharding
from .training import adapters, training
from .writes import writes


# What is attacked, and how often each is drawn.
kinds: dict[Callable[[Case], None], int] = {
    products: 8,
    programs: 6,
    round_trips: 4,
    folders: 2,
    long_sums: 2,
    sharding: 2,
    manual: 1,
    writes: 3,
    training: 1,
    adapters: 1,
    einsums: 1,
    optimizers: 1,
    extremes: 1,
    saved: 1,
}
_of_eight_devices = (sharding, manual, optimizers)


def _drawn():
    skipped = _of_eight_devices if jax.device_count() < 8 else ()
    return [k for k, times in kinds.items() if k not in skipped for _ in range(times)]


def run_case(
    seed: int, number: int, verbose: bool = False, lenient: bool = False
) -> Case:
    """Draws and checks one case. What raises an error has failed."""
    case = Case(seed, number, lenient)
    kind = case.pick(_drawn())
    if verbose:
        print(f"--seed {seed} --case {number}: {kind.__name__}", flush=True)
    try:
        kind(case)
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        text = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        place = f"{pathlib.Path(where.filename).name}:{where.lineno}"
        case.check(kind.__name__, f"{text} ({place})", kind=kind.__name__)
        if verbose:
            traceback.print_exc()
    case.met["cases", kind.__name__] += 1
    return case


def run(
    seconds: float, seed: int, verbose: bool = False, lenient: bool = False
) -> tuple[collections.Counter, list[tuple[int, str]]]:
    """Cases one after another until the time is over: what they met, and what failed,
    with the number of the case."""
    met, failures = collections.Counter(), []
    start, number = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        case = run_case(seed, number, verbose, lenient)
        met += case.met
        failures += [(number, line) for line in case.failures]
        if verbose:
            for line in case.failures:
                print("   ", line, flush=True)
        number += 1
        _limit_maps()
    return met, failures


def _limit_maps():
    # What is compiled is mapped into memory, and Linux lets a process have 65530 maps.
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
