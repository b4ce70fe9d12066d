"""Systems from outside, run on the same data and measured by the same code: what our recipes are compared with.

TF-IDF rankers run in this process; every other peer is a script beside this file. A script imports nothing of unidec
and names its packages in its head (PEP 723), by which `uv run` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One system.

    Attributes:
        about: what it does, in one line with its source.
        script: its file beside this one; "": a TF-IDF ranker, whose results do not depend on the seed.
    """

    about: str
    script: str = ""


PEERS: dict[str, Peer] = {
    "knn": Peer("TF-IDF: the 100 nearest training queries vote for their labels with the square of their cosine"),
    "label-match": Peer("TF-IDF: cosine of the query's and the label's text"),
    "mix": Peer("kNN votes + 0.5 x label match, each scaled to a row maximum of 1"),
    "xr-linear": Peer(
        "PECOS: linear models in a tree over the labels (PIFA beside label text), teacher-forced negatives "
        "(Yu et al. 2022)",
        "xr_linear.py",
    ),
    "plt": Peer(
        "napkinXC: probabilistic label tree of logistic regressions over hierarchical k-means (Jasinska-Kobus et al. "
        "2020)",
        "plt.py",
    ),
    "st-static": Peer(
        "sentence-transformers: bag of the same start token embeddings (StaticEmbedding), multiple-negatives ranking "
        "(Henderson et al. 2017)",
        "sentence.py",
    ),
    "st-transformer": Peer(
        "sentence-transformers: the same transformer, all layers fine-tuned, multiple-negatives ranking with "
        "cached gradients (Gao et al. 2021)",
        "sentence.py",
    ),
}
