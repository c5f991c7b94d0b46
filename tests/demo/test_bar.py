"""The bar of `eqquant demo`, which follows what the library does."""

import io
import time

from rich.console import Console

from eqquant._progress import Watched
from eqquant.demo._bar import Bar


def test_follow(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    bar = Bar(100.0, console)

    def shown():
        with console.capture() as captured:
            console.print(bar)
        return captured.get().rstrip()

    assert shown().endswith("1:40 left")
    with bar.shown():
        with bar.follow("calibrating", 60.0):
            for i in Watched([0, 1, 2], "Calibrating", "abc".__getitem__):
                assert f"calibrating, {i}/3 {'abc'[i]}" in shown()
                clock[0] += 20
        # As fast as was thought.
        assert "0:40 left" in shown()
        bar.doing("timing")
        clock[0] += 10
        assert "0:30 left timing" in shown()
        # What takes longer than was thought leaves half of it to do.
        clock[0] += 90
        assert "0:20 left timing" in shown()
    assert capsys.readouterr().err == ""
