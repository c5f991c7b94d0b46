import os


def prepare() -> None:
    """What has to be said before JAX is imported: eight devices that one machine plays,
    as for the tests."""
    flag = "--xla_force_host_platform_device_count=8"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
