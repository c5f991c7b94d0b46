import dataclasses
import math

from ._clock import Times


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The speed and the error of one way to compute `x @ w`.

    - `name`: the name of the format or of the other library's product. It ends in
      `", XLA"` if the kernel was chosen without the native library, and in
      `", prepacked"` if the weight was prepacked by [`eqquant.tree_prepack`][].
    - `rows`: the number of rows of `x`.
    - `shape`: the shape of `w`.
    - `times`: the times of the product, next to the times of float32.
    - `memory`: the bytes per second at which this machine reads memory, in the fastest
      of the same rounds. Measured for one row only.
    - `kernel`: the kernel that [`eqquant.explain`][] names. `None` for products of
      other libraries.
    - `bits_per_weight`: the bits per weight, scales included.
    - `temporary_bytes`: the memory that the compiled product allocates while it runs.
      `None` if unknown.
    - `error`: the largest error, against the product with the decoded weight, relative
      to `|x| @ |w|`, for normally distributed `x`.
    - `outlier_error`: the largest error for `x` with one number in each row set to 300.
    - `compile_seconds`: the time to compile; `None` if nothing is compiled.
    - `failure`: the exception of another library, in which case there are no times and
      errors.
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
        """The rate at which the weight is read, as a share of `memory`."""
        nbytes = self.bits_per_weight * math.prod(self.shape) / 8
        return nbytes / self.times.median / self.memory
