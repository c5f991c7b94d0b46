"""The path through a trellis whose points are nearest to a sequence of numbers, by the
algorithm of Viterbi.

Without feedback of errors, all is done in integers, so that every compiler and every
machine finds the same path. `kernels.native` computes the same, sequence by sequence.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt, UInt8


# The largest absolute values of the numbers of sequences, and of points: so the costs
# of paths fit into 32 bits, above those that tell where a path comes from.
most_units = 600
most_point = 510
# The numbers before and after a seam that are looked at to choose its state.
_around = 48
# The bytes of the predecessors of all states that are in memory at a time.
_enough = 2**25


class Bitshift(NamedTuple):
    """A bitshift trellis of `2**states` states. From a state `s` each code `c` of some
    bits leads to `(s << bits | c) % 2**states`.

    - `points`: called with states, returns the integer that each stands for.
    """

    states: int
    bits: int
    points: Callable[[UInt[Array, "*s"]], Int[Array, "*s"]]

    @property
    def codes(self) -> int:
        """How many codes there are. As many states are the predecessors of a state, and
        as many have the same ones."""
        return 2**self.bits

    @property
    def groups(self) -> int:
        """How many groups there are of states with the same predecessors."""
        return 2 ** (self.states - self.bits)


def nearest_paths(x: Int[Array, "n t"], trellis: Bitshift) -> UInt[Array, "n t"]:
    """The states of closed paths, from whose last state a code leads to the first, with
    nearly the least sum of squares of differences from sequences of integers. These are
    at most `most_units`, as absolute values.

    Where a path is closed, it is in the state that is the best of a piece of the
    sequence around that seam. So there are two searches: one for that state, and one
    for the path.
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
    """The states of the best paths. If there is a `seam`, only of those from a state
    that ends with these bits, and to another one."""
    n, t = x.shape
    states, bits, groups = trellis.states, trellis.bits, trellis.groups
    state = jnp.arange(2**states, dtype=jnp.uint32)[None]
    points = trellis.points(state)
    # A path is known by its cost, and below that by the highest bits of its state: the
    # only ones in which the predecessors of a state differ. So the least of these tells
    # the predecessor, too: the first of equally good ones.
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
        # More than what states differ by, at any time, once paths from the seam have
        # reached all of them.
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
    """The states of paths, from their last ones back."""

    def step(state, found):
        group = state >> np.uint32(trellis.bits)
        before = jnp.take_along_axis(found, group[:, None].astype(jnp.int32), axis=1)
        shift = np.uint32(trellis.states - trellis.bits)
        return (before[:, 0].astype(jnp.uint32) << shift) | group, state

    first, rest = lax.scan(step, last, found, reverse=True)
    return jnp.concatenate([first[None], rest]).T


# So many numbers are looked back for at a time.
_pending = 16
# The cost of a path that is not allowed.
_never = np.float32(1e20)


def nearest_paths_with_feedback(
    x: Float[Array, "n t"],
    target: Float[Array, "n t"],
    feedback: Float[Array, "t t"],
    weights: Float[Array, " t"],
    trellis: Bitshift,
) -> UInt[Array, "n t"]:
    """The states of closed paths of which each point should come near to its target,
    and to what the errors of the points before it ask of it. Each path that survives
    has errors, and so targets, of its own. (In float32: two compilers may find paths
    that are as good.)

    - `x`: what errors are counted from. `t` should be a multiple of 16.
    - `feedback`: how much of the error of each point (the first axis) each takes; zero
        but for those after it.
    - `weights`: what the square of each difference counts.
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

    # (Of a row, all errors of all paths are in memory.)
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
        # Of the path to each group: its cost, what is pending of the next numbers,
        # its errors at these, and where it was before them.
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

    # (A group is that of the state before a number, too.)
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
    """Codes one after another, from the lowest bit of the first word on. `t` should be
    a multiple of 32."""
    number, size = _unit(bits)
    *lead, t = codes.shape
    codes = codes.reshape(*lead, t // number, number)
    start = bits * np.arange(number, dtype=np.int32)
    words = []
    for i in range(size):
        # (By 32 or more bits, nothing is left.)
        up = np.clip(start - 32 * i, 0, 32).astype(np.uint32)
        down = np.clip(32 * i - start, 0, 32).astype(np.uint32)
        up, down = (a.reshape((1,) * (len(lead) + 1) + (-1,)) for a in (up, down))
        parts = lax.shift_right_logical(codes, jnp.broadcast_to(down, codes.shape))
        parts = lax.shift_left(parts, jnp.broadcast_to(up, codes.shape))
        words.append(jnp.sum(parts, axis=-1, dtype=jnp.uint32))
    return jnp.stack(words, axis=-1).reshape(*lead, t * bits // 32)


def to_states(
    words: UInt[Array, "*b w n"], following: UInt[Array, "*b w n"], trellis: Bitshift
) -> UInt[Array, "*b t n"]:
    """The states of paths, from their codes: one path below another. The state of a
    code consists of its bits, the lowest, and of those after it.

    - `following`: the word that comes after each.
    """
    number, size = _unit(trellis.bits)
    *lead, w, n = words.shape
    start = trellis.bits * np.arange(number, dtype=np.int32)
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
    found = (low | high) & np.uint32(2**trellis.states - 1)
    return found.reshape(*lead, w // size * number, n)


def _unit(bits):
    # After how many codes one begins with a word again, and how many words those are.
    common = np.gcd(bits, 32)
    return int(32 // common), int(bits // common)
