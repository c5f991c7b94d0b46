import csv
import sys

from . import on_gpu


def worker(code):
    return on_gpu.Worker([sys.executable, "-u", "-c", code])


_echo = """
import json, sys, time
print('{"status": "ready"}')
for line in sys.stdin:
    case = json.loads(line)
    time.sleep(case.get("sleep", 0))
    if case.get("exit"):
        sys.exit(3)
    print("a warning")
    print(json.dumps({"status": "right", "number": case["number"]}))
"""


# A case that hangs or that ends the process does not take the next ones with it.
def test_cases_that_do_not_end():
    some = worker(_echo)
    assert some.run(dict(number=1), 60) == dict(status="right", number=1)
    assert some.run(dict(number=2, sleep=1000), 0.2) == dict(status="timed out")
    assert some.run(dict(number=3), 60) == dict(status="right", number=3)
    assert some.run(dict(number=4, exit=True), 60) == dict(status="ended")
    assert some.run(dict(number=5), 60) == dict(status="right", number=5)
    some.stop()


def test_a_process_that_does_not_start():
    assert worker("raise SystemExit(1)").run({}, 60) == dict(status="ended")


# Every kind is checked before anything is timed.
def test_order():
    found = [*on_gpu.cases(["a", "b"], ["b"], True)]
    stages = [case["stage"] for case in found]
    assert stages == sorted(stages) and stages.count("check") == 2 * 4
    assert {case["kernel"] for case in found[:8]} == {"bfloat16_mma"}
    timed = [case for case in found if case["stage"] == "time"]
    rows = [case["m"] for case in timed if case["kernel"] is None]
    assert sorted({*rows}) == [1, 4, 16, 64, 256, 1024] and len(rows) == 12
    mma = [case["m"] for case in timed if case["kernel"] == "bfloat16_mma"]
    assert max(mma) == 256


# On this machine, by the kernels that it has.
def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "to_check", ((3, 1000, 131),))
    monkeypatch.setattr("tests.kernels.ptx.kinds.kinds", {"int4": None, "nf4": None})
    monkeypatch.setattr("tests.kernels.ptx.kinds.timed", ("nf4",))
    path = tmp_path / "found.csv"
    assert on_gpu.main(str(path)) == 0
    with path.open() as file:
        found = [*csv.DictReader(file)]
    assert [row["status"] for row in found[:2]] == ["right"] * 2
    assert all(float(row["error"]) < float(row["bound"]) for row in found[:2])
    assert {row["status"] for row in found[2:]} == {"timed"}
    assert all(float(row["ratio"]) > 0 for row in found[2:])
