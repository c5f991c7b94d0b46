import os


def prepare() -> None:
    """What has to be said before JAX is imported: eight devices that one machine plays,
    as for the tests, unless `EQQUANT_TESTS` says that they run on a GPU."""
    flag = "--xla_force_host_platform_device_count=8"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
    where = os.environ.get("EQQUANT_TESTS", "cpu")
    os.environ["JAX_PLATFORMS"] = where if where == "cpu" else f"{where},cpu"
