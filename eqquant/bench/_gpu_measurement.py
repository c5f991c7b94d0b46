import dataclasses


@dataclasses.dataclass(frozen=True)
class GPUMeasurement:
    """How fast, and how right, a product on a GPU is.

    - `name`: of the format, or `"bfloat16"` for the product that JAX itself has.
    - `shape`: that of the weight, contracted axis first.
    - `rows`: how many it is multiplied with.
    - `kernel`: the one that [`eqquant.explain`][] names. `None` for bfloat16.
    - `seconds`: for one product, the median of several rounds.
    - `baseline`: the same for bfloat16.
    - `nbytes`: of the weight as it is stored.
    - `copy`: how many bytes a second a copy within the memory of the GPU reads and
        writes.
    - `error`: the largest error, relative to `|x| @ |w|`.
    - `bound`: what that should be at most.
    """

    name: str
    shape: tuple[int, int]
    rows: int
    kernel: str | None
    seconds: float
    baseline: float
    nbytes: int
    copy: float
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """How many times as fast as bfloat16 this is."""
        return self.baseline / self.seconds

    @property
    def bandwidth(self) -> float:
        """At which rate the weight is read, as a share of that of a copy."""
        return self.nbytes / self.seconds / self.copy

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound
