from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Sharding
from jaxtyping import Array

from ._capture import Capture, Slot, Sums
from ._evaluate import run
from ._program import Cut, Program, variables
from ._signature import Signature
from ._view import whole


# The value of a variable; two values if it depends on quantized leaves.
Value = Array | tuple[Array, Array]


class Segment(NamedTuple):
    """A segment of a program that sums the inputs of some products of a leaf, in two
    lanes: of the original model, and of the model as quantized so far.

    - `program`, `cut`: its equations.
    - `slot`: the leaf, and the axes that are contracted.
    - `turn`: the axes of the leaf along which scans in `cut` choose a step.
    - `inputs`: the variables that it reads.
    - `key`: equal for segments that compute the same.
    """

    program: Program
    cut: Cut
    slot: Slot
    turn: tuple[int, ...]
    inputs: list[Var]
    key: Hashable

    def compiled(
        self, dtype: Any, sharding: Sharding | None
    ) -> Callable[[Sums, Sequence[Value], list[int]], tuple[Sums, list[Array]]]:
        """Returns a function of the sums of both lanes, of the values of `inputs`, and
        of the steps along the axes of `turn`. It returns the sums with the new terms,
        and the values of `cut.outs`.

        - `dtype`: the dtype of floating-point values between segments, if it is shorter
            than their own.
        - `sharding`: the sharding of the sums.
        """
        program, cut, (leaf, contracted) = self.program, self.cut, self.slot
        double = program.double
        var: Any = program.leaves[leaf]
        shapes = [var.aval.shape]
        changing = {0: program.changing.get(leaf, frozenset())}
        sharded = sharding is not None
        read = dict.fromkeys(v for eqn in cut.eqns for v in variables(eqn))
        made = {v for eqn in cut.eqns for v in eqn.outvars}
        operands = [v for v in read if v not in made]
        axes = [0 if v in double else None for v in operands]

        def step(sums, inputs, turn):
            turn = dict(zip(self.turn, turn, strict=True))
            old, new, later = {}, {}, {}
            for v, value in zip(self.inputs, inputs, strict=True):
                if v not in program.free:
                    later[v] = _restored(value, v)
                else:
                    old[v], new[v] = value if v in double else (value, value)
            seen = {var: (whole(0, shapes[0]),)}
            plain = Capture(shapes, {}, changing, sharded=sharded)
            for eqn in cut.weights:
                run(eqn, old, seen, plain.apply)
                if double.isdisjoint(eqn.outvars):
                    new.update((v, old[v]) for v in eqn.outvars)
                    continue
                run(eqn, new, {**seen}, plain.apply)
                new.update((v, old[v]) for v in eqn.outvars if v not in double)

            def lane(sums, values):
                own = {(0, contracted): sums}
                capture = Capture(shapes, own, changing, _lanes, turn, sharded=sharded)
                env = dict(zip(operands, values, strict=True))
                found = {**seen}
                for i, eqn in enumerate(cut.eqns):
                    run(eqn, env, found if i in cut.views else {}, capture.apply)
                return capture.sums[0, contracted], [env[v] for v in cut.outs]

            both = lambda v: jnp.stack([old[v], new[v]]) if v in double else old[v]
            values = [both(v) if v in program.free else later[v] for v in operands]
            out_axes = [0 if v in double else None for v in cut.outs]
            sums, outs = jax.vmap(lane, (0, axes), (0, out_axes), axis_name=_lanes)(
                sums, values
            )
            return sums, [_shortened(a, dtype) for a in outs]

        place = None if sharding is None else (sharding, None)
        return jax.jit(step, donate_argnums=0, out_shardings=place)


_lanes = "eqquant lane"


def segment(program: Program, cut: Cut, slot: Slot, turn: tuple[int, ...]) -> Segment:
    """Returns the segment of a program that a cut gives, at the turn of a slot."""
    signature = Signature(program.changing.get(slot[0], frozenset()))
    eqns = signature.of(cut.weights), signature.of(cut.eqns)
    leaf = program.leaves[slot[0]]
    kinds = tuple(
        (v.aval, v in program.free, v in program.double, v is leaf)
        for v in signature.inputs
    )
    outs = tuple(signature.numbers[v] for v in cut.outs)
    key = (*eqns, cut.views, kinds, outs, slot[1], turn)
    return Segment(program, cut, slot, turn, signature.inputs, key)


def _shortened(a, dtype):
    wider = (
        dtype is not None
        and jnp.issubdtype(a.dtype, jnp.floating)
        and a.dtype.itemsize > jnp.dtype(dtype).itemsize
    )
    return a.astype(dtype) if wider else a


def _restored(a, var):
    return a if a.dtype == var.aval.dtype else a.astype(var.aval.dtype)
