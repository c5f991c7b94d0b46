import csv
import pathlib
from collections.abc import Sequence
from typing import Any

from ._clock import Times
from ._decode import Decoding
from ._measurement import Measurement


def write_measurements(path: pathlib.Path, rows: Sequence[Measurement]) -> None:
    _write(path, [_measurement(row) for row in rows])


def write_decodings(path: pathlib.Path, rows: Sequence[Decoding]) -> None:
    _write(path, [_decoding(row) for row in rows])


def _measurement(row: Measurement) -> dict[str, Any]:
    k, n = row.shape
    first = dict(format=row.name, rows=row.rows, shape=f"{k}x{n}", kernel=row.kernel)
    rate = dict(bandwidth=row.bandwidth, memory_bytes_per_second=row.memory)
    rest = ("bits_per_weight", "temporary_bytes", "error", "outlier_error")
    rest = (*rest, "compile_seconds", "failure")
    return {**first, **_times(row.times), **rate, **_fields(row, rest)}


def _decoding(row: Decoding) -> dict[str, Any]:
    first = dict(format=row.name, parameters=row.parameters)
    rest = ("tokens_per_second", "bits_per_weight", "nbytes", "temporary_bytes")
    rest = (*rest, "error", "compile_seconds")
    return {**first, **_times(row.times), **_fields(row, rest)}


def _fields(row: Measurement | Decoding, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _times(times: Times) -> dict[str, float]:
    return dict(
        ratio=times.ratio,
        ratio_p10=times.ratio_p10,
        median_seconds=times.median,
        p10_seconds=times.p10,
        p90_seconds=times.p90,
        rounds=len(times.seconds),
    )


def _write(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
