"""The instruction sets that the native library has kernels for, each with those before
it, and which of them this machine has."""

import eqquant.kernels.native._library as library


levels = ("avx2", "avx512", "avx512_bf16", "amx")
available = levels[: 0 if library.missing() else library.level()]
