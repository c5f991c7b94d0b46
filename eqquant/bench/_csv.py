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
    return dict(
        format=row.name,
        rows=row.rows,
        shape=f"{k}x{n}",
        kernel=row.kernel,
        **_times(row.times),
        bandwidth=row.bandwidth,
        memory_bytes_per_second=row.memory,
        bits_per_weight=row.bits_per_weight,
        temporary_bytes=row.temporary_bytes,
        error=row.error,
        outlier_error=row.outlier_error,
        compile_seconds=row.compile_seconds,
        failure=row.failure,
    )


def _decoding(row: Decoding) -> dict[str, Any]:
    return dict(
        format=row.name,
        parameters=row.parameters,
        **_times(row.times),
        tokens_per_second=row.tokens_per_second,
        bits_per_weight=row.bits_per_weight,
        nbytes=row.nbytes,
        temporary_bytes=row.temporary_bytes,
        error=row.error,
        compile_seconds=row.compile_seconds,
    )


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
