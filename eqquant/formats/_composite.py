import abc

from ._base import Stored
from ._scaled import AbstractScaled


class AbstractComposite(AbstractScaled):
    """A format with the codes of another one, `base`, whose scales are put together
    from what is stored. Its kernels are those of `base`."""

    @property
    @abc.abstractmethod
    def base(self) -> AbstractScaled:
        """The format whose codes these are."""

    @abc.abstractmethod
    def flat(self, stored: Stored, tail: int) -> Stored:
        """What `base` would have stored for the same numbers."""
