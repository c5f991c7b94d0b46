import copyreg

import equinox as eqx
import jax.tree_util as jtu


# A compiled program goes to another process with the trees of its arguments and results
# pickled. In those of modules, Equinox has a constant of its own where there is nothing
# to say, and knows it by its identity. So it is pickled by its name, which finds the
# same one; a copy would be taken for something that was said.
_, (_nothing, *_) = jtu.tree_structure(eqx.nn.Identity()).node_data()
if type(_nothing).__module__.startswith("equinox."):
    copyreg.pickle(type(_nothing), lambda _: "MISSING")
