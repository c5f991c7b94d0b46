import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqquant._trace import InSequence, Sequential

from ..helpers import normal
from .in_sequence import check_in_sequence, rounded, Silent


def weights(**shapes):
    """Arrays of these shapes, whose products are about as large as their inputs."""
    make = lambda i, shape: normal(*shape, seed=i) / shape[-2] ** 0.5
    return {name: make(i, shape) for i, (name, shape) in enumerate(shapes.items())}


def inputs(*shape, seed=0):
    return normal(*shape, seed=100 + seed)


# Of several shapes.
batches = [inputs(3, 8, 16), inputs(2, 8, 16, seed=1), inputs(3, 8, 16, seed=2)]


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def layer(w, x, tell, name=lambda x: x, at=()):
    """A layer of a transformer, with one head."""
    y = norm(x)
    for each in "qkv":
        tell.rows(name(each), y, at)
    q, k, v = (y @ w[each] for each in "qkv")
    mask = jnp.tril(jnp.ones((8, 8), bool))
    y = jax.nn.softmax(jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k), -1e9)) @ v
    tell.rows(name("o"), y, at)
    x = x + y @ w["o"]
    y = norm(x)
    tell.rows(name("up"), y, at)
    y = jax.nn.silu(y @ w["up"])
    tell.rows(name("down"), y, at)
    return x + y @ w["down"]


sizes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "o": (16, 16)}
sizes |= {"up": (16, 24), "down": (24, 16)}
order_of_groups = ("kqv", "o", "up", "down")


def listed(depth):
    each = {f"{name}{i}": sizes[name] for i in range(depth) for name in sizes}
    return weights(**each)


def stacked(*depths):
    return weights(**{name: (*depths, *shape) for name, shape in sizes.items()})


def call_listed(model, x, tell):
    for i in range(len(model) // len(sizes)):
        w = {name: model[f"{name}{i}"] for name in sizes}
        x = layer(w, x, tell, lambda name: f"{name}{i}")
    return x


def call_stacked(model, x, tell):
    """The layers of a scan, or of scans in scans."""
    depths = model["q"].shape[:-2]

    def one(x, w):
        return jax.checkpoint(lambda w, x: layer(w, x, tell))(w, x), None

    if tell.is_traced:
        for _ in depths[1:]:
            one = lambda x, w, inner=one: lax.scan(inner, x, w)
        return lax.scan(one, x, model)[0]
    for at in np.ndindex(*depths):
        w = {name: a[at] for name, a in model.items()}
        x = layer(w, x, tell, at=at)
    return x


def test_list_of_layers():
    order = check_in_sequence(call_listed, listed(2), batches)
    names = ("k{0}q{0}v{0}", "o{0}", "up{0}", "down{0}")
    wanted = [name.format(i) for i in range(2) for name in names]
    assert [names for names, _ in order] == wanted


@pytest.mark.examples(1)
@pytest.mark.parametrize("depths", ((3,), (2, 2)))
def test_scan(depths):
    order = check_in_sequence(call_stacked, stacked(*depths), batches)
    steps = np.ndindex(*depths)
    assert sorted(order) == sorted((n, at) for at in steps for n in order_of_groups)


@pytest.mark.thorough
def test_reversed_scan():
    def call(model, x, tell):
        if tell.is_traced:
            step = lambda x, w: (layer(w, x, tell), None)
            return lax.scan(step, x, model, reverse=True)[0]
        for i in (1, 0):
            w = {name: a[i] for name, a in model.items()}
            x = layer(w, x, tell, at=(i,))
        return x

    order = check_in_sequence(call, stacked(2), batches)
    assert [at for _, at in order] == [(1,)] * 4 + [(0,)] * 4


@pytest.mark.thorough
def test_vmapped():
    def call(model, x, tell):
        if not tell.is_traced:
            return call_stacked(model, x, tell)
        return jax.vmap(lambda x: call_stacked(model, x[None], tell)[0])(x)

    check_in_sequence(call, stacked(2), batches)


@pytest.mark.thorough
def test_weights_that_are_turned_first():
    """What depends on weights alone is of the weights as they are at their turn."""

    def call(model, x, tell):
        turned = {name: jnp.swapaxes(a, -1, -2) for name, a in model.items()}
        back = {name: jnp.swapaxes(a, -1, -2) for name, a in turned.items()}
        return call_stacked(back, x, tell)

    check_in_sequence(call, stacked(2), batches)


@pytest.mark.thorough
def test_masked_weights():
    mask = np.tril(np.ones((1, 16, 24), np.float32))

    def call(model, x, tell):
        return call_stacked(model | {"up": model["up"] * mask}, x, tell)

    check_in_sequence(call, stacked(2), batches)


@pytest.mark.thorough
def test_loop_over_time():
    """A recurrent network, of which the loop is run again for each weight in it."""
    model = weights(inner=(16, 16), state=(16, 16), out=(16, 16))

    def call(model, x, tell):
        def step(h, x):
            tell.rows("inner", x)
            tell.rows("state", h)
            h = jnp.tanh(x @ model["inner"] + h @ model["state"])
            return h, h

        h, xs = jnp.full((len(x), 16), 0.5), jnp.swapaxes(x, 0, 1)
        if tell.is_traced:
            _, ys = lax.scan(step, h, xs)
        else:
            each = []
            for t in xs:
                h, y = step(h, t)
                each.append(y)
            ys = jnp.stack(each)
        tell.rows("out", ys)
        return ys @ model["out"]

    order = check_in_sequence(call, model, batches)
    assert [names for names, _ in order] == ["inner", "state", "out"]
    fn = lambda model, x: call(model, x, Silent())
    again = InSequence(Sequential(fn, batches), model, model).again
    assert again == [(name, "it is used in a `scan`") for name in ("inner", "state")]


@pytest.mark.thorough
def test_layers_in_a_loop():
    """The steps of a scan within a loop that is run again."""

    def call(model, x, tell):
        if tell.is_traced:
            return lax.map(lambda x: call_stacked(model, x[None], tell)[0], x)
        return call_stacked(model, x, tell)

    order = check_in_sequence(call, stacked(2), batches)
    assert [at for _, at in order] == [(0,)] * 4 + [(1,)] * 4


@pytest.mark.thorough
def test_branches():
    model = weights(first=(16, 16), a=(16, 16), b=(16, 16))

    def call(model, x, tell):
        tell.rows("first", x)
        y = jnp.tanh(x @ model["first"])
        if tell.is_traced:
            apply = lambda w: lambda y: y @ w
            return lax.cond(len(x) > 2, apply(model["a"]), apply(model["b"]), y)
        name = "a" if len(x) > 2 else "b"
        tell.rows(name, y)
        return y @ model[name]

    check_in_sequence(call, model, batches)


def test_used_at_several_depths():
    model = weights(first=(16, 16), tied=(16, 16), between=(16, 16), last=(16, 16))

    def call(model, x, tell):
        for name in ("first", "tied", "between", "tied", "last"):
            tell.rows(name, x)
            x = jnp.tanh(x @ model[name])
        return x

    order = check_in_sequence(call, model, batches)
    assert [names for names, _ in order] == ["first", "tied", "between", "last"]
    fn = lambda model, x: call(model, x, Silent())
    run = InSequence(Sequential(fn, batches), model, model)
    assert run.again == [("tied", "it is used in several places")]


@pytest.mark.examples(1)
@pytest.mark.parametrize("head", (False, True))
def test_embedding(head):
    """What is looked up in it is of its numbers as they are, whenever it is its turn:
    that of the head is last; one that is used before others starts them again."""
    model = weights(table=(20, 16), first=(16, 16), second=(16, 16))
    ids = [inputs(3, 8, seed=i) for i in range(2)]
    ids = [(jnp.abs(x) * 1000).astype(jnp.int32) % 20 for x in ids]

    def call(model, ids, tell):
        x = model["table"][ids]
        tell.rows("first", x)
        x = jnp.tanh(x @ model["first"])
        if not head:
            tell.rows("table", x)
            x = x @ model["table"].T @ jnp.ones((20, 16))
        tell.rows("second", x)
        x = jnp.tanh(x @ model["second"])
        if head:
            tell.rows("table", x)
            x = x @ model["table"].T
        return x

    order = check_in_sequence(call, model, ids)
    names = ["first", "second"]
    names.insert(2 if head else 1, "table")
    assert [name for name, _ in order] == names


@pytest.mark.thorough
def test_experts():
    model = weights(first=(16, 16), inner=(4, 16, 24), outer=(4, 24, 16))

    def call(model, x, tell):
        tell.rows("first", x)
        x = jnp.tanh(x @ model["first"])
        tell.rows("inner", x)
        y = jnp.tanh(jnp.einsum("btd,edk->ebtk", x, model["inner"]))
        tell.rows("outer", y, lead=1)
        return jnp.sum(jnp.einsum("ebtk,ekd->ebtd", y, model["outer"]), 0)

    check_in_sequence(call, model, batches)


@pytest.mark.thorough
def test_ragged_experts():
    """Each expert meets the rows that it met in the model as it was."""
    model = weights(
        first=(16, 16), router=(16, 2), inner=(2, 16, 24), outer=(2, 24, 16)
    )

    def call(model, x, tell):
        x = x.reshape(-1, 16)
        tell.rows("first", x)
        x = jnp.tanh(x @ model["first"])
        tell.rows("router", x)
        chosen = tell.same(jnp.argmax(x @ model["router"], -1))
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=2)
        x = x[order]
        if tell.is_traced:
            y = jnp.tanh(lax.ragged_dot(x, model["inner"], sizes))
            return lax.ragged_dot(y, model["outer"], sizes)
        chosen = jnp.arange(2)[:, None, None] == chosen[order][None, :, None]
        x = jnp.where(chosen, x, 0)
        tell.rows("inner", x, lead=1)
        y = jnp.tanh(x @ model["inner"])
        tell.rows("outer", y, lead=1)
        return jnp.sum(y @ model["outer"], 0)

    check_in_sequence(call, model, batches)


@pytest.mark.thorough
def test_experts_that_are_looked_up():
    """Rows that choose their matrices, which is before the turn of others."""
    model = weights(first=(16, 16), experts=(3, 16, 16))

    def call(model, x, tell):
        x = x.reshape(-1, 16)
        chosen = tell.same(jnp.arange(len(x)) % 3 + jnp.sum(x > 9).astype(jnp.int32))
        own = model["experts"][chosen]
        tell.rows("first", x)
        x, own = lax.optimization_barrier((jnp.tanh(x @ model["first"]), own))
        is_own = chosen[None] == jnp.arange(3)[:, None]
        tell.rows("experts", jnp.where(is_own[..., None], x, 0), lead=1)
        return jnp.einsum("nd,ndk->nk", x, own)

    check_in_sequence(call, model, batches)


@pytest.mark.thorough
def test_convolution():
    model = weights(first=(16, 16), kernel=(8, 16, 3), last=(8, 16))

    def call(model, x, tell):
        tell.rows("first", x)
        x = jnp.tanh(x @ model["first"])
        y = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        patches = [y[:, i : i + 8] for i in range(3)]
        tell.rows("kernel", jnp.stack(patches, -1).reshape(*y.shape[:1], 8, 48))
        numbers = ("NWC", "OIW", "NWC")
        x = lax.conv_general_dilated(
            x, model["kernel"], (1,), "SAME", dimension_numbers=numbers
        )
        tell.rows("last", jnp.tanh(x))
        return jnp.tanh(x) @ model["last"]

    check_in_sequence(call, model, batches)


@pytest.mark.examples(1)
@pytest.mark.parametrize("keep", ("disk", "host", "device"))
def test_where_arrays_are_kept(keep):
    model = stacked(2)
    check_in_sequence(call_stacked, model, batches, keep=keep)
    options = dict(keep=keep, keep_dtype=jnp.bfloat16)
    check_in_sequence(call_stacked, model, batches, 0.02, **options)


@pytest.mark.thorough
def test_bfloat16():
    low = lambda x: x.astype(jnp.bfloat16)
    model, rows = jax.tree.map(low, (stacked(2), batches))
    check_in_sequence(call_stacked, model, rows, 0.05)


@pytest.mark.examples(1)
@pytest.mark.parametrize("depth", (2, 4, 8))
@pytest.mark.parametrize("call, make", ((call_listed, listed), (call_stacked, stacked)))
def test_each_layer_runs_at_most_three_times(call, make, depth):
    ran = []

    class Counting(Silent):
        def rows(self, name, x, at=(), lead=0):
            if name.startswith("down"):
                jax.debug.callback(lambda _: ran.append(name), x[0, 0, 0])

    model, xs = make(depth), batches[:2]
    fn = lambda model, x: call(model, x, Counting())
    run = InSequence(Sequential(fn, xs), model, model)
    for group in run.groups:
        run.measure(group)
        for path, _ in group.weights:
            run.put(path, group, rounded(model[path][group.index]))
    jax.effects_barrier()
    assert 0 < len(ran) <= 3 * depth * len(xs)


@pytest.mark.examples(1)
@pytest.mark.parametrize("call, make", ((call_listed, listed), (call_stacked, stacked)))
def test_layers_are_compiled_once(call, make):
    number = []
    for depth in (3, 5):
        model = make(depth)
        fn = lambda model, x: call(model, x, Silent())
        run = InSequence(Sequential(fn, batches[:1]), model, model)
        for group in run.groups:
            run.measure(group)
        number.append(len(run.segments))
    assert number[0] == number[1] <= 2 * len(order_of_groups)
