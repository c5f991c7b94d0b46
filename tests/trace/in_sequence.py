"""A plain model of what `Sequential` does: for each weight, the whole model is called,
layer by layer, and tells what it multiplies its weights with."""

import jax
import jax.numpy as jnp
import numpy as np

from eqquant._trace import InSequence, Sequential


class Silent:
    """What a model that is traced tells."""

    is_traced = True

    def rows(self, name, x, at=(), lead=0):
        """An array, at an index along its leading axes, meets the rows `x`; other ones
        for each index along its `lead` next axes."""

    def same(self, integers):
        """Integers, which are to be those of the model as it was."""
        return integers


class Told:
    is_traced = False

    def __init__(self, wanted, integers=()):
        self.found = []
        self.integers = []
        self._wanted = wanted
        self._given = list(integers)

    def rows(self, name, x, at=(), lead=0):
        if (name, at) == self._wanted:
            x = np.asarray(x, np.float64)
            self.found.append(x.reshape(*x.shape[:lead], -1, x.shape[-1]))

    def same(self, integers):
        self.integers.append(integers)
        return self._given.pop(0) if self._given else integers


def rounded(w):
    """To nearest, with a step of its own for each matrix."""
    step = jnp.max(jnp.abs(w), (-2, -1), keepdims=True) / 3
    return (jnp.round(w / step) * step).astype(w.dtype)


def check_in_sequence(call, model, batches, rtol=1e-4, **options):
    """Quantizes the arrays of a dict one after another, and compares what `Sequential`
    says of their inputs with what they are.

    **Arguments:**

    - `call`: a function of the dict, a batch, and whom to tell of products.

    **Returns:**

    The groups, in order, each as the names of its arrays and its index.
    """
    fn = lambda model, batch: call(model, batch, Silent())
    run = InSequence(Sequential(fn, batches, **options), model, model)
    new, order = {**model}, []
    for group in run.groups:
        names = [path for path, _ in group.weights]
        order.append(("".join(names), group.steps))
        wanted = names[0], group.steps
        x, y = [], []
        for batch in batches:
            told = Told(wanted)
            call(model, batch, told)
            x += told.found
            told = Told(wanted, told.integers)
            call(new, batch, told)
            y += told.found
        x, y = (np.concatenate(each, -2) for each in (x, y))
        gram, cross = run.measure(group)
        transposed = lambda a: np.swapaxes(a, -1, -2)
        for got, a in ((gram, transposed(y) @ y), (cross, transposed(x) @ y)):
            if got.is_diagonal:
                a = np.diagonal(a)
            value = np.asarray(got.value).reshape(a.shape)
            np.testing.assert_allclose(value, a, atol=rtol * np.max(a), err_msg=wanted)
        assert np.array_equal(np.ravel(gram.rows), np.ravel(np.sum(np.any(y, -1), -1)))
        for path in names:
            part = rounded(model[path][group.index])
            new[path] = new[path].at[group.index].set(part)
            run.put(path, group, part)
    assert jax.tree.all(jax.tree.map(lambda a: not a.is_deleted(), model))
    return order
