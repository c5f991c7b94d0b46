import io
import time

import pytest
from rich.console import Console

from eqquant import _progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    console = lambda **_: Console(file=file, width=200, force_terminal=True)
    monkeypatch.setattr(_progress, "_console", console)
    return file


def test_bar(clock, terminal):
    names = [f"layers.{i}" for i in range(40)]
    bar = _progress.Watched(names, "Quantizing", str)
    bar.say("Parts are run again.")
    for i, name in enumerate(bar):
        assert (i > 0) == ("Quantizing" in terminal.getvalue())
        if i == 1:
            bar.note("compiling")
        clock[0] += 30 if i < 2 else 5
    shown = terminal.getvalue()
    assert "Parts are run again." in shown and "compiling" in shown
    # 30 seconds twice, of which one is no measure: (30 + 7 * 5) / 8 for each of 31.
    assert "Quantizing takes about 6 minutes." in shown
    assert "39/40" in shown and "layers.39" in shown and "s each" in shown


def test_quick_or_no_terminal(clock, terminal, monkeypatch, capsys):
    for _ in _progress.Watched(range(9), "Quantizing"):
        clock[0] += 0.1
    assert terminal.getvalue() == ""
    monkeypatch.undo()
    bar = _progress.Watched([1, 2], "Quantizing")
    for _ in bar:
        bar.note("compiling")
    assert capsys.readouterr() == ("", "")


def test_told_to(clock, terminal):
    told = []
    with _progress.told_to(lambda part, what: told.append((part, what))):
        bar = _progress.Watched([1, 3], "Quantizing", str, size=int)
        for _ in bar:
            bar.note("compiling")
            clock[0] += 100
    each = (0.0, "0/2 1"), (0.25, "1/2 3")
    assert told == [(n, t) for n, text in each for t in (text, f"{text} (compiling)")]
    assert terminal.getvalue() == ""
