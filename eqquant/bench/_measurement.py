import dataclasses
import math

from ._clock import Times


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How fast, and how right, one way to compute `x @ w` is.

    - `name`: of the format, or of what else it is. `", XLA"` is added where the kernel
      is the best of those without the native library, next to one with it.
    - `rows`: how many rows `x` has.
    - `shape`: that of `w`.
    - `times`: of the product, next to those of float32.
    - `memory`: how many bytes a second this machine reads from memory: the most in any
      round, in turn with the products. Not measured but for one row.
    - `kernel`: the one that [`eqquant.explain`][] names. `None` where the product is
      not of this library.
    - `bits_per_weight`: scales included.
    - `temporary_bytes`: what the compiled product allocates while it runs. `None` if
      that is not known.
    - `error`: the largest error of the product with the weight as it is stored,
      relative to `|x| @ |w|`, for normally distributed `x`.
    - `outlier_error`: the same, for `x` with one number in each row set to 300.
    - `compile_seconds`: `None` if nothing is compiled.
    - `failure`: what it raised instead, if it is of another library. There are no times
      then, and no errors.
    """

    name: str
    rows: int
    shape: tuple[int, int]
    times: Times = Times((), ())
    memory: float = math.nan
    kernel: str | None = None
    bits_per_weight: float = math.nan
    temporary_bytes: int | None = None
    error: float = math.nan
    outlier_error: float = math.nan
    compile_seconds: float | None = None
    failure: str | None = None

    @property
    def bandwidth(self) -> float:
        """At which rate the weight is read, as a share of `memory`."""
        nbytes = self.bits_per_weight * math.prod(self.shape) / 8
        return nbytes / self.times.median / self.memory
