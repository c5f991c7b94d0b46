"""Solvers in NumPy and float64, as their papers write them."""

import numpy as np

import eqquant as eqq
from eqquant.formats import Layout


def inputs(kind, k, rows=1024, seed=0):
    """What a weight may be multiplied with. Of the covariance of correlated inputs, the
    `i`th eigenvalue is `1 / i`; with outliers, 6 of 512 channels are 15 to 50 times as
    large."""
    r = np.random.default_rng(seed)
    x = r.standard_normal((rows, k))
    if kind in ("correlated", "outliers"):
        rotation, _ = np.linalg.qr(r.standard_normal((k, k)))
        x = x * np.arange(1, k + 1) ** -0.5 @ rotation
    if kind == "outliers":
        some = r.permutation(k)[: 6 * k // 512]
        x[:, some] *= r.uniform(15, 50, len(some))
    elif kind == "few":
        x = x[: k // 8]
    elif kind == "dead":
        x[:, k // 4 : k // 2] = 0
    elif kind == "twice":
        x[:, 1::2] = x[:, ::2]
    elif kind == "none":
        x = 0 * x
    elif kind == "shifted":
        x = x + 50 * r.standard_normal(k)
    return x


def gram(x):
    return np.asarray(x.T @ x, np.float32)


def error(w, q, h):
    """`e H e^T` of each row `e`, of numbers or of an array."""
    q = np.asarray(q.dequantize() if eqq.is_quantized(q) else q, np.float64)
    e = np.asarray(w, np.float64) - q
    return np.sum((e @ np.asarray(h, np.float64)) * e, -1)


def parts(stored, format, k):
    """The codes, and the scale and the offset at each position. By `decode`."""
    layout = Layout(format).trimmed(stored, k)
    codes = np.asarray(format.unpack(stored["codes"], layout.tail)).astype(int)

    def spread(a):
        a = np.asarray(format.spread(a, stored, k), np.float64)
        return np.broadcast_to(a, (*a.shape[:-1], k))

    offset = format.offsets(stored)
    scale = format.scales(stored, layout.tail)
    return codes, spread(scale), None if offset is None else spread(offset)


def gptq(w, h, order, points, scale, offset, kind, damping=0.01):
    """The codes of GPTQ with given scales, column by column: Algorithm 1 of Frantar et
    al., with the Cholesky factor of the inverse."""
    w, h = np.array(w, np.float64)[:, order], np.array(h, np.float64)
    mean = np.mean(np.diag(h))
    more = np.where(np.diag(h) > 0, 0, mean) + damping * mean
    h = (h + np.diag(more))[order][:, order]
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    k = len(order)
    codes = np.zeros(w.shape, int)
    margin = np.zeros(w.shape)
    for i in range(k):
        at = order[i]
        s = scale[:, at, None]
        if kind == "minimum":
            numbers = points * s + offset[:, at, None]
        elif kind == "zero_point":
            numbers = (points - offset[:, at, None]) * s
        else:
            numbers = points * s
        numbers = np.broadcast_to(numbers, (len(w), numbers.shape[-1]))
        far = np.abs(numbers - w[:, i, None])
        code = np.argmin(far, -1)
        first, second = np.sort(far, -1)[:, :2].T
        margin[:, i] = second - first
        codes[:, at] = code
        number = np.take_along_axis(numbers, code[:, None], -1)[:, 0]
        off = (w[:, i] - number) / upper[i, i]
        w[:, i:] -= off[:, None] * upper[i, i:]
    return codes, margin


def hqq(w, points, scale, minimum, p, beta, kappa, steps):
    """The sum of `|error|**p` of each block that half-quadratic quantization finds, by
    equations 3 to 6 of Badri & Shaji: with the minimum, or if there is none, the scale,
    of least squares. Errors are in units of their mean at first."""
    w, m = np.asarray(w, np.float64), minimum
    s, unit, losses = scale[:, None], None, []
    for i in range(steps + 1):
        numbers = points * s + (0 if m is None else m[:, None])
        code = np.argmin(np.abs(numbers[:, None] - w[..., None]), -1)
        error = w - np.take_along_axis(numbers, code, -1)
        losses.append(np.sum(np.abs(error) ** p, -1))
        unit = np.mean(np.abs(error), -1, keepdims=True) if i == 0 else unit
        x = error / unit
        with np.errstate(divide="ignore"):
            shrunk = np.abs(x) - np.abs(x) ** (p - 1) / (beta * kappa**i)
        target = w - unit * np.sign(x) * np.maximum(shrunk, 0)
        point = points[code]
        if m is None:
            square = np.sum(point**2, -1, keepdims=True)
            s = np.sum(target * point, -1, keepdims=True) / square
        else:
            m = np.mean(target - point * s, -1)
    return np.min(losses, 0)
