"""Systems from outside, run on the same data and measured by the same code: what our recipes are compared with.

`run` does one peer in a folder; heavy packages are imported by it alone.
"""

from unidec.comparison.peers.registry import NAMES, PeerInfo, check_options, info
from unidec.comparison.peers.running import run

__all__ = ["NAMES", "PeerInfo", "check_options", "info", "run"]
