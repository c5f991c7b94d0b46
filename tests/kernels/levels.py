"""The instruction sets that the native library has kernels for and that this machine
has, each after those before it that it extends."""

import eqquant.kernels.native._library as library


_sets = () if library.missing() else library._sets(library.loaded())
available = tuple(features[-1] for features, is_here in _sets if is_here)
