"""Products of other libraries, beside which ours are measured.

To add one, write a function from a weight to a `Candidate` in the file of its kind, and
list it in `_peer.py`.
"""

from ._peer import (
    installed_peers as installed_peers,
    missing_packages as missing_packages,
)
