"""External systems with which our recipes are compared, on the same data and measured by the same
code.

TF-IDF rankers run in this process; every other peer is a script beside this file. A script imports
nothing of unidec; `uv run` installs the packages that its header declares (PEP 723)."""

from __future__ import annotations

from dataclasses import dataclass

from unidec.config import packaged


@dataclass(frozen=True)
class Peer:
    """One system: what it does, and its script beside this file ("": a TF-IDF ranker, the same for
    every seed).
    """

    about: str
    script: str = ""
    reads_vectors: bool = False  # text vectors from the model of the cell in `after`


PEERS = {name: Peer(**peer) for name, peer in packaged("comparison/peers/peers.yaml").items()}
