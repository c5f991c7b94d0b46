"""Small models of random weights, of packages that know nothing of this one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array


class Example(NamedTuple):
    """A model, and a call of it.

    - `call`: a function of the model and of `args`.
    - `spared`: globs over the paths of arrays with several axes that are no matrices:
        tables of embeddings and positions, masks, and vectors of a stack of layers.
    """

    model: Any
    call: Callable[..., Any]
    args: tuple[Any, ...]
    spared: tuple[str, ...] = ()


def _apply(model, *args):
    return model(*args)


tokens = jnp.array([3, 1, 4, 1, 5, 9, 2, 6], jnp.int32)
key = jr.key(0)


def _causal(family, **changes):
    from eqx_zoo import CausalLM
    from eqx_zoo.models.causal_lm.config import Config

    from ..interop import families

    config = Config.from_hf(families.config(family, **changes))
    return Example(CausalLM(config, key=key), _apply, (tokens,), ("*embed_tokens*",))


def llama():
    return _causal("Llama")


def qwen3():
    return _causal("Qwen3", tie_word_embeddings=False)


def qwen3_moe():
    return _causal("Qwen3Moe")


def bert():
    from eqx_zoo import Encoder, EncoderConfig

    config = EncoderConfig("BertModel", 99, 64, 2, 4, 128, 32, 2, 1e-12)
    return Example(Encoder(config, key=key), _apply, (tokens,), ("*embeddings.*",))


def vit():
    from equimo.vision.models import VisionTransformer

    model = VisionTransformer(
        32, 3, 64, 8, 4, [2], num_classes=10, reg_tokens=2, key=key
    )
    call = lambda model, x: model(x, key, inference=True)
    return Example(model, call, (_image(32),), ("*pos_embed*", "*_token*"))


def convnext():
    from equimo.vision.models import ConvNeXt

    sizes = {"depths": [1, 1, 2, 1], "dims": [32, 48, 64, 96], "num_classes": 10}
    model = ConvNeXt(3, **sizes, layer_scale_init_value=1.0, key=key)
    call = lambda model, x: model(x, key, inference=True)
    return Example(model, call, (_image(64),))


def masked_autoregressive_flow():
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    flow = masked_autoregressive_flow(
        key,
        base_dist=Normal(jnp.zeros(6)),
        cond_dim=3,
        flow_layers=3,
        nn_width=48,
        nn_depth=2,
    )
    call = lambda flow, x, u: flow.log_prob(x, u)
    args = jr.normal(key, (5, 6)), jr.normal(key, (5, 3))
    return Example(flow, call, args, ("*bias*",))


def constrained_mlp():
    import klax

    mlp = klax.nn.MLP(16, 8, [64, 64], weight_wrap=klax.NonNegative, key=key)
    call = lambda model, x: jax.vmap(klax.finalize(model))(x)
    return Example(mlp, call, (jr.normal(key, (5, 16)),))


def convex_network():
    import klax

    model = klax.nn.FICNN(16, 8, [64, 64], key=key)
    call = lambda model, x: jax.vmap(klax.finalize(model))(x)
    return Example(model, call, (jr.normal(key, (5, 16)),))


def fno():
    from pdequinox.arch import ClassicFNO

    model = ClassicFNO(2, 3, 2, hidden_channels=16, num_modes=5, num_blocks=2, key=key)
    return Example(model, _apply, (_image(16),))


def unet():
    from pdequinox.arch import ClassicUNet

    model = ClassicUNet(2, 3, 2, hidden_channels=16, num_levels=2, key=key)
    return Example(model, _apply, (_image(16),))


def esm2():
    import esm2quinox

    model = esm2quinox.ESM2(2, 64, 4, token_dropout=True, key=key)
    proteins = jnp.asarray(esm2quinox.tokenise(["SPIDERMAN", "SPUDMAN"]))
    call = lambda model, tokens: jax.vmap(model)(tokens)
    # The layers are one, stacked.
    spared = ("embedding*", "*bias*", "*norm*")
    return Example(model, call, (proteins,), spared)


def neural_ode():
    import diffrax

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t, y, args):
            return jnp.tanh(self.mlp(jnp.append(y, t)))

    def call(field, y):
        terms = diffrax.ODETerm(field)  # pyright: ignore
        steps = diffrax.SaveAt(t0=True, t1=True)
        solver = diffrax.Tsit5()
        return diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.1, y, saveat=steps).ys

    field = Field(eqx.nn.MLP(17, 16, 64, depth=2, key=key))
    return Example(field, call, (jr.normal(key, (16,)),))


class _Recurrent(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __call__(self, xs):
        start = jnp.zeros(48), jnp.zeros(48)
        (hidden, _), _ = lax.scan(lambda s, x: (self.cell(x, s), None), start, xs)
        return self.head(hidden)


def lstm():
    model = _Recurrent(eqx.nn.LSTMCell(32, 48, key=key), eqx.nn.Linear(48, 8, key=key))
    return Example(model, _apply, (jr.normal(key, (7, 32)),))


class _Stack(eqx.Module):
    layers: eqx.nn.MLP

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, a: (x + eqx.combine(a, static)(x), None)
        return lax.scan(jax.checkpoint(step), x, arrays)[0]


def scanned_layers():
    make = lambda key: eqx.nn.MLP(32, 32, 64, depth=1, key=key)
    stack = _Stack(eqx.filter_vmap(make)(jr.split(key, 4)))
    return Example(stack, _apply, (jr.normal(key, (32,)),), ("*bias",))


class _Experts(eqx.Module):
    """Stacked layers that others read the weights of."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear


class _Mixture(eqx.Module):
    router: eqx.nn.Linear
    experts: _Experts

    def __call__(self, x):
        scores = jax.nn.softmax(jax.vmap(self.router)(x))
        weight, expert = lax.top_k(scores, 2)
        order = jnp.argsort(expert.ravel())
        sizes = jnp.bincount(expert.ravel(), length=4).astype(jnp.int32)
        up, down = self.experts.up.weight, self.experts.down.weight
        hidden = lax.ragged_dot(x[order // 2], up.transpose(0, 2, 1), sizes)
        y = lax.ragged_dot(jax.nn.gelu(hidden), down.transpose(0, 2, 1), sizes)
        y = y[jnp.argsort(order)].reshape(-1, 2, x.shape[-1])
        return jnp.sum(weight[..., None] * y, 1)


def mixture_of_experts():
    layer = lambda i, o, key: eqx.filter_vmap(
        lambda key: eqx.nn.Linear(i, o, use_bias=False, key=key)
    )(jr.split(key, 4))
    model = _Mixture(
        eqx.nn.Linear(32, 4, key=key), _Experts(layer(32, 48, key), layer(48, 32, key))
    )
    return Example(model, _apply, (jr.normal(key, (9, 32)),))


class _Weight(eqx.Module):
    """A field, and no call."""

    weight: Array


class _Attention(eqx.Module):
    query: _Weight
    key: _Weight
    value: _Weight
    out: _Weight

    def __call__(self, x):
        q = jnp.einsum("td,hde->hte", x, self.query.weight)
        k = jnp.einsum("td,hde->hte", x, self.key.weight)
        v = jnp.einsum("td,hde->hte", x, self.value.weight)
        y = jax.nn.softmax(q @ k.mT) @ v
        return jnp.einsum("hte,hed->td", y, self.out.weight)


class _Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: list[_Attention]
    head: _Weight

    def __call__(self, ids):
        x = jax.vmap(self.embedding)(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.head.weight


def containers():
    keys = iter(jr.split(key, 20))
    weight = lambda *shape: _Weight(jr.normal(next(keys), shape) / 4)
    into = lambda: weight(4, 32, 16)
    layers = [_Attention(into(), into(), into(), weight(4, 16, 32)) for _ in range(2)]
    embedding = eqx.nn.Embedding(16, 32, key=key)
    model = _Transformer(embedding, layers, weight(32, 48))
    return Example(model, _apply, (tokens,), ("embedding*",))


def _image(n):
    return jr.normal(key, (3, n, n))


# By name, with the package that has it, if it is not written here.
examples: dict[str, tuple[str | None, Callable[[], Example]]] = {
    "Llama": ("eqx_zoo", llama),
    "Qwen3": ("eqx_zoo", qwen3),
    "Qwen3-MoE": ("eqx_zoo", qwen3_moe),
    "BERT": ("eqx_zoo", bert),
    "ViT": ("equimo", vit),
    "ConvNeXt": ("equimo", convnext),
    "masked autoregressive flow": ("flowjax", masked_autoregressive_flow),
    "constrained MLP": ("klax", constrained_mlp),
    "convex network": ("klax", convex_network),
    "FNO": ("pdequinox", fno),
    "UNet": ("pdequinox", unet),
    "ESM2": ("esm2quinox", esm2),
    "neural ODE": ("diffrax", neural_ode),
    "LSTM": (None, lstm),
    "scan over layers": (None, scanned_layers),
    "stacked experts": (None, mixture_of_experts),
    "fields of containers": (None, containers),
}
