"""The Viterbi algorithm: finds the path through a trellis whose points are nearest to a
sequence of numbers.

Without error feedback, all computations are in integers, so that every compiler and
every machine finds the same path. `kernels.native` computes the same, sequence by
sequence.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt, UInt8


# The largest absolute values of sequences and of points. With these, a path's cost and
# the bits that identify its predecessor fit in 32 bits together.
most_units = 600
most_point = 510
# How many numbers before and after a seam are searched to choose its state.
_around = 48
# The largest size in bytes of the predecessors of all states in memory.
_enough = 2**25


class Bitshift(NamedTuple):
    """A bitshift trellis of `2**states` states. From a state `s`, each code `c` of
    `bits` bits leads to the state `(s << bits | c) % 2**states`.

    - `points`: a function from states to their points, which are integers.
    """

    states: int
    bits: int
    points: Callable[[UInt[Array, "*s"]], Int[Array, "*s"]]

    @property
    def codes(self) -> int:
        """The number of codes. Each state has as many predecessors, and a group of as
        many states shares them."""
        return 2**self.bits

    @property
    def groups(self) -> int:
        """The number of groups of states with the same predecessors."""
        return 2 ** (self.states - self.bits)


def nearest_paths(x: Int[Array, "n t"], trellis: Bitshift) -> UInt[Array, "n t"]:
    """Returns the states of closed paths with nearly the least sum of squared
    differences from sequences of integers. A path is closed if a code leads from its
    last state to its first. The absolute values of `x` are at most `most_units`.

    A first search, over a piece of the sequence around the seam of the closed path,
    chooses the state at the seam. A second search finds the path through it.
    """
    n, t = x.shape
    at_a_time = max(1, _enough // (t * trellis.groups))
    if n <= at_a_time:
        return _nearest_paths(x, trellis)
    number = -(-n // at_a_time)
    size = -(-n // number)
    x = jnp.pad(x, ((0, number * size - n), (0, 0))).reshape(number, size, t)
    found = lax.map(lambda x: _nearest_paths(x, trellis), x)
    return found.reshape(number * size, t)[:n]


def _nearest_paths(x, trellis):
    half = min(_around, x.shape[-1] // 2)
    around = jnp.concatenate([x[:, -half:], x[:, :half]], axis=-1)
    seam = _search(around, trellis)[:, half - 1] % np.uint32(trellis.groups)
    return _search(x, trellis, seam)


def _search(x, trellis, seam=None):
    """Returns the states of the best paths. With a `seam`, only paths whose last state,
    and the state before their first, end with these bits are searched."""
    n, t = x.shape
    states, bits, groups = trellis.states, trellis.bits, trellis.groups
    state = jnp.arange(2**states, dtype=jnp.uint32)[None]
    points = trellis.points(state)
    # The key of a path is its cost and, in the bits below, the highest bits of its
    # state, the only ones in which the predecessors of a state differ. So the least key
    # also identifies the predecessor. Ties go to the first one.
    last = state >> np.uint32(states - bits)
    low = np.uint32(trellis.codes - 1)

    def costs(x):
        difference = x[:, None] - points
        return ((difference**2).astype(jnp.uint32) << np.uint32(bits)) + last

    def step(keys, x):
        best = jnp.min(keys.reshape(n, trellis.codes, groups), axis=1)
        found = best & low
        best = best - found
        best = best - jnp.min(best, axis=1, keepdims=True)
        new = jnp.repeat(best, trellis.codes, axis=1) + costs(x)
        return new, found.astype(jnp.uint8)

    keys = costs(x[:, 0])
    if seam is not None:
        # An upper bound on the difference of the costs of two states, at any time after
        # paths from the seam have reached all states.
        never = -(-states // bits) * (most_units + most_point) ** 2
        others = state >> np.uint32(bits) != seam[:, None]
        keys = jnp.where(others, keys + np.uint32(never << bits), keys)
    keys, found = lax.scan(step, keys, x[:, 1:].T)
    if seam is not None:
        ends = state % np.uint32(groups) == seam[:, None]
        keys = jnp.where(ends, keys, np.uint32(2**32 - 1))
    return _traced(jnp.argmin(keys, axis=1).astype(jnp.uint32), found, trellis)


def _traced(
    last: UInt[Array, " n"], found: UInt8[Array, "t n g"], trellis: Bitshift
) -> UInt[Array, "n _"]:
    """Returns the states of paths, traced back from their last ones."""

    def step(state, found):
        group = state >> np.uint32(trellis.bits)
        before = jnp.take_along_axis(found, group[:, None].astype(jnp.int32), axis=1)
        shift = np.uint32(trellis.states - trellis.bits)
        return (before[:, 0].astype(jnp.uint32) << shift) | group, state

    first, rest = lax.scan(step, last, found, reverse=True)
    return jnp.concatenate([first[None], rest]).T


# How many numbers share one correction by the errors before all of them.
_pending = 16
# The initial cost of paths that do not start at the seam.
_never = np.float32(1e20)


def nearest_paths_with_feedback(
    x: Float[Array, "n t"],
    target: Float[Array, "n t"],
    feedback: Float[Array, "t t"],
    weights: Float[Array, " t"],
    trellis: Bitshift,
) -> UInt[Array, "n t"]:
    """Returns the states of closed paths whose points approximate their targets, where
    each target is corrected for the errors of the points before it. Each surviving path
    has its own errors, and so its own targets. The search is in float32, so different
    compilers may find different, equally good paths.

    - `x`: the original numbers, relative to which errors are computed. `t` should be a
        multiple of 16.
    - `feedback`: `feedback[i, j]` is the factor by which the error of point `i` is
        added to target `j`. It should be zero unless `j > i`.
    - `weights`: the weight of each squared difference.
    """
    n, t = x.shape
    half = min(_around, t // 2)
    around = jnp.concatenate([target[:, -half:], target[:, :half]], axis=-1)

    def nearest(rows):
        x, target, around = (a[None] for a in rows)
        apart, one = jnp.zeros((2 * half, 2 * half)), jnp.ones(2 * half)
        seam = _search_with_feedback(around, around, apart, one, trellis)
        seam = seam[:, half - 1] % np.uint32(trellis.groups)
        return _search_with_feedback(x, target, feedback, weights, trellis, seam)[0]

    # All errors of all surviving paths of a row are in memory, so that only some rows
    # fit at a time.
    number = max(1, _enough // (4 * t * trellis.groups))
    return lax.map(nearest, (x, target, around), batch_size=min(number, max(n, 1)))


def _search_with_feedback(x, target, feedback, weights, trellis, seam=None):
    n, t = x.shape
    states, groups, size = 2**trellis.states, trellis.groups, _pending
    state = jnp.arange(states, dtype=jnp.uint32)
    points = trellis.points(state).astype(jnp.float32)[None]
    before = (state >> np.uint32(trellis.bits)).astype(jnp.int32)
    group = jnp.arange(groups, dtype=jnp.int32)[None]
    precise = lambda a, b: jnp.matmul(a, b, precision="highest")
    taken = lambda a, i: jnp.take_along_axis(a, i[..., None], axis=1)

    def step(carry, given):
        # For the best path to each group: its cost; its corrected targets and its
        # errors for the numbers of this chunk; and its group before the chunk.
        cost, pending, errors, place = carry
        i, x, weight, asked = given
        aim = jnp.take_along_axis(pending, jnp.full((1, 1, 1), i), axis=2)[..., 0]
        costs = cost[:, before] + weight * (aim[:, before] - points) ** 2
        costs = costs.reshape(n, trellis.codes, groups)
        code = jnp.argmin(costs, axis=1).astype(jnp.int32)
        cost = jnp.min(costs, axis=1)
        chosen = code * groups + group
        parent = chosen >> trellis.bits
        error = x[:, None] - points[0, chosen]
        pending = taken(pending, parent) + error[..., None] * asked[None, None]
        errors = taken(errors, parent).at[:, :, i].set(error)
        place = jnp.take_along_axis(place, parent, axis=1)
        cost = cost - jnp.min(cost, axis=1, keepdims=True)
        return (cost, pending, errors, place), code.astype(jnp.uint8)

    def some(carry, given):
        cost, past = carry
        x, target, weights, rows, j = given
        of_these = lax.dynamic_slice_in_dim(feedback, j, size, axis=1)
        pending = target[:, None] + precise(past, of_these)
        asked = lax.dynamic_slice_in_dim(rows, j, size, axis=1)
        start = (
            cost,
            pending,
            jnp.zeros_like(pending),
            jnp.broadcast_to(group, (n, groups)),
        )
        each = jnp.arange(size, dtype=jnp.int32), x.T, weights, asked
        (cost, _, errors, place), found = lax.scan(step, start, each)
        past = lax.dynamic_update_slice_in_dim(taken(past, place), errors, j, axis=2)
        return (cost, past), found

    # A path starts in the group of the state before its first number: the seam itself.
    allowed = (
        jnp.ones((n, groups), bool)
        if seam is None
        else (group == seam[:, None].astype(jnp.int32))
    )
    start = jnp.where(allowed, np.float32(0), _never), jnp.zeros((n, groups, t))
    cut = lambda a: jnp.moveaxis(a.reshape(n, t // size, size), 1, 0)
    first = jnp.arange(0, t, size, dtype=jnp.int32)
    parts = lambda a: a.reshape(t // size, size, *a.shape[1:])
    given = cut(x), cut(target), parts(weights), parts(feedback), first
    (cost, _), found = lax.scan(some, start, given)
    found = found.reshape(t, n, groups)
    last = jnp.argmin(cost, axis=1) if seam is None else seam
    last = last.astype(jnp.uint32)
    shift = np.uint32(trellis.states - trellis.bits)
    code = jnp.take_along_axis(found[-1], last[:, None].astype(jnp.int32), axis=1)
    state = (code[:, 0].astype(jnp.uint32) << shift) | last
    return _traced(state, found[:-1], trellis)


def to_words(codes: UInt[Array, "*b t"], bits: int) -> UInt[Array, "*b w"]:
    """Packs codes one after another, from the lowest bit of the first word on. `t`
    should be a multiple of 32."""
    number, size = _unit(bits)
    *lead, t = codes.shape
    codes = codes.reshape(*lead, t // number, number)
    start = bits * np.arange(number, dtype=np.int32)
    words = []
    for i in range(size):
        # A shift by 32 bits gives zero.
        up = np.clip(start - 32 * i, 0, 32).astype(np.uint32)
        down = np.clip(32 * i - start, 0, 32).astype(np.uint32)
        up, down = (a.reshape((1,) * (len(lead) + 1) + (-1,)) for a in (up, down))
        parts = lax.shift_right_logical(codes, jnp.broadcast_to(down, codes.shape))
        parts = lax.shift_left(parts, jnp.broadcast_to(up, codes.shape))
        words.append(jnp.sum(parts, axis=-1, dtype=jnp.uint32))
    return jnp.stack(words, axis=-1).reshape(*lead, t * bits // 32)


def to_states(
    words: UInt[Array, "*b w n"],
    following: UInt[Array, "*b w n"],
    states: int,
    bits: int,
) -> UInt[Array, "*b t n"]:
    """Returns the states of paths from their packed codes. Paths are along the last
    axis. The lowest bits of a state are its own code, and the bits above belong to the
    codes after it.

    - `following`: the word after each of `words`.
    - `states`: the number of bits of a state, at most 32.
    - `bits`: the number of bits of a code.
    """
    number, size = _unit(bits)
    *lead, w, n = words.shape
    start = bits * np.arange(number, dtype=np.int32)
    word, bit = (a.reshape((1,) * (len(lead) + 1) + (-1, 1)) for a in divmod(start, 32))
    shape = *lead, w // size, number, n
    words, following = (a.reshape(*shape[:-2], size, n) for a in (words, following))

    def at(words):
        found = words[..., :1, :]
        for i in range(1, size):
            found = jnp.where(word == i, words[..., i : i + 1, :], found)
        return jnp.broadcast_to(found, shape)

    shift = lambda bits: jnp.broadcast_to(bits.astype(np.uint32), shape)
    low = lax.shift_right_logical(at(words), shift(bit))
    high = lax.shift_left(at(following), shift(32 - bit))
    found = (low | high) & np.uint32(2**states - 1)
    return found.reshape(*lead, w // size * number, n)


def _unit(bits):
    # The smallest number of codes that fill whole words, and the number of these words.
    common = np.gcd(bits, 32)
    return int(32 // common), int(bits // common)
