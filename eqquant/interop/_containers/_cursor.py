import numpy as np

from ._file import short


class Cursor:
    """Reads a file from its beginning, and never past its end. `what` names the value
    in messages."""

    def __init__(self, data: memoryview):
        self._data = data
        self.position = 0
        self._spent = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.position

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            raise _cut_short(f"{what} should take {size} bytes", self.left)
        self.position += size
        return self._data[self.position - size : self.position]

    def uint32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, nbytes: int, most: int) -> int:
        """Reads a count of items that follow, each of at least `nbytes` bytes."""
        count = self.uint64(what)
        if count > self.left // nbytes:
            raise _cut_short(f"{what} should be {count}", self.left)
        if count > most:
            raise ValueError(f"{what} should be {most} at most. Got {count}.")
        return count

    def text(self, what: str, most: int = 2**16, errors: str = "strict") -> str:
        text = bytes(self.take(self.count(f"the length of {what}", 1, most), what))
        try:
            return text.decode("utf-8", errors)
        except UnicodeDecodeError as e:
            raise ValueError(f"{what} should be text. Got {short(text)}.") from e

    def texts(self, count: int, what: str, errors: str) -> list[str]:
        data, position, end = self._data, self.position, len(self._data)
        found = []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > end:
                raise _cut_short(f"{what} should be {count}", end - start)
            found.append(str(data[start:position], "utf-8", errors))
        self.position = position
        return found

    def numbers(self, count: int, dtype: np.dtype, what: str) -> list:
        data = self.take(count * dtype.itemsize, what)
        return np.frombuffer(data, dtype).tolist()

    def spend(self, count: int, most: int) -> None:
        """Counts values, which take more memory than their bytes in the file, and
        limits them."""
        self._spent += count
        if self._spent > most:
            raise ValueError(f"its metadata should have {most} values at most.")


def _cut_short(expected, left):
    return ValueError(
        f"it is cut short, or damaged: {expected}, and {left} bytes are left."
    )
