"""External systems with which our recipes are compared, on the same data and measured by the same
code.

TF-IDF rankers run in this process; every other peer is a script beside this file. A script imports
nothing of unidec; `uv run` installs the packages that its header declares (PEP 723)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One system: what it does, and its script beside this file ("": a TF-IDF ranker, the same for
    every seed).
    """

    about: str
    script: str = ""
    reads_vectors: bool = False  # text vectors from the model of the cell in `after`


PEERS: dict[str, Peer] = {
    "knn": Peer(
        "TF-IDF: the 100 nearest training queries vote for their labels with the square of "
        "their cosine"
    ),
    "label-match": Peer("TF-IDF: cosine of the query's and the label's text"),
    "mix": Peer("kNN votes + 0.5 x label match, each scaled to a row maximum of 1"),
    "xr-linear": Peer(
        "PECOS: linear models in a tree over the labels (Yu et al. 2022)", "xr_linear.py"
    ),
    "xr-linear-tuned": Peer(
        "PECOS XR-Linear, the best of eight settings on the validation split", "xr_linear.py"
    ),
    "xr-linear-vectors": Peer(
        "the same on TF-IDF beside text vectors of the cell that it comes after",
        "xr_linear.py",
        reads_vectors=True,
    ),
    "plt": Peer(
        "napkinXC: probabilistic label tree, the best of eight settings on the validation split",
        "label_tree.py",
    ),
    "st-static": Peer(
        "sentence-transformers: bag of the same start token embeddings, trained by MNR with mined "
        "negatives",
        "sentence.py",
    ),
    "st-transformer": Peer(
        "sentence-transformers: the same transformer, all layers, trained by MNR with mined "
        "negatives",
        "sentence.py",
    ),
}
