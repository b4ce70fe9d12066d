"""What kind of label index is built and how it is searched, in the words of faiss: the strings of
`index.factory` and `index.search`.

    factory     stored for each label                      labels compared with a query
    Flat        float32 vector                             all
    PQx4        a 4-bit code for every `dsub` dimensions   all
    HNSW32      float32 vector and graph links             those reached by a walk
    IVF,PQx4    codes as PQx4, in inverted lists           those in the nearest `nprobe` lists

The default, "auto", chooses among them by the number of labels. A factory is a string of
`faiss.index_factory` without the numbers that only the data knows: how many codes a label has, and,
unless it is given (IVF4096), how many lists there are. Settings of the build may follow:
`PQx4,dsub=2`, `HNSW32,efConstruction=100`. A search string has the form of faiss's
`ParameterSpace`: `nprobe=32,k_factor_rf=4`. A setting that is left out has its default.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from unidec.config.section import Stored
from unidec.errors import ConfigError

Kind = Literal["flat", "pq", "hnsw", "ivf-pq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPRESSED: frozenset[Kind] = frozenset({"pq", "ivf-pq"})
"""Kinds whose codes select candidates, which are then scored exactly with the float32 vectors."""

# to compare a query with so many labels takes less than a millisecond
FLAT_LABELS = 2_000
# with more labels, inverted lists cost less than reading all codes; as `pool.mining: auto`
CODE_LABELS = 100_000

Count = Annotated[int, Field(ge=1, le=1 << 40)]
CountOrZero = Annotated[int, Field(ge=0, le=1 << 40)]

_NUMBER = "[1-9][0-9]{0,8}"
_CODES = f"PQx4(,dsub=(?P<code_dims>{_NUMBER}))?"
_RESCORED = f"(\nk_factor_rf=(?P<rescore>{_NUMBER}))?"
_FORMS: dict[Kind, str] = {
    "flat": "Flat",
    "pq": _CODES + _RESCORED,
    "hnsw": f"HNSW(?P<links>{_NUMBER})?(,efConstruction=(?P<build>{_NUMBER}))?"
    f"(\nefSearch=(?P<search>{_NUMBER}))?",
    "ivf-pq": f"IVF(?P<lists>{_NUMBER})?,{_CODES}{_RESCORED}(\nnprobe=(?P<probes>{_NUMBER}))?",
}
"""Regular expressions for a factory and, each in a line of its own, the settings of a search in
alphabetical order; the groups are fields of `IndexOptions`.
"""


class IndexOptions(Stored):
    """The numbers of an index, as bundle.json stores them; those of other kinds are ignored.

    Attributes:
        links, build, search: M, efConstruction and efSearch of HNSW.
        lists: number of inverted lists; 0: chosen by `num_lists`.
        probes: nprobe, lists that a search scans; 0: chosen by `num_probes`.
        code_dims: dsub, dimensions that share a 4-bit code.
        rescore: k_factor_rf, candidates per result that are scored exactly.
    """

    links: Count = 32
    build: Count = 200
    search: Count = 200
    lists: CountOrZero = 0
    probes: CountOrZero = 0
    code_dims: Count = 4
    rescore: Count = 8


class IndexSpec(IndexOptions):
    """Kind and numbers of an index."""

    kind: Kind = "flat"

    @classmethod
    def parse(cls, factory: str, search: str = "", num_labels: int = 0) -> IndexSpec:
        """Read `index.factory` and `index.search`.

        Args:
            num_labels: L, by which "auto" chooses.

        Raises:
            ConfigError: not a factory, or a setting that a search of this index does not have.
        """
        settings = sorted(search.split(",")) if search else []
        chosen = _factory_for(num_labels) if factory == "auto" else factory
        text = "\n".join([chosen, *settings])
        for kind, form in _FORMS.items():
            if match := re.fullmatch(form, text):
                given = match.groupdict()
                numbers: Any = {field: int(number) for field, number in given.items() if number}
                return cls(kind=kind, **numbers)
        raise ConfigError(
            "no factory of a label index, or a search setting that it does not have",
            where="index.factory index.search",
            got=f"{factory!r} and {search!r}",
            expected='Flat; PQx4 with search "k_factor_rf=8"; HNSW32 with "efSearch=200"; or '
            '"IVF,PQx4" with "nprobe=32,k_factor_rf=8" (docs/bundles.md)',
        )

    def num_lists(self, num_labels: int) -> int:
        """Number of lists: `lists`, or 16 sqrt(L) with at least 64 labels per list. Capped at L /
        8.
        """
        most = num_labels // 8
        if self.lists:
            return max(1, min(self.lists, most))
        auto = round(16 * math.sqrt(num_labels))
        return max(1, min(auto, num_labels // 64))

    def num_probes(self, num_lists: int) -> int:
        """Number of lists that a search scans: `probes`, or a twelfth of the lists but
        at least 8.
        """
        return min(self.probes or max(8, num_lists // 12), num_lists)


def _factory_for(num_labels: int) -> str:
    if num_labels <= FLAT_LABELS:
        return "Flat"
    return "PQx4" if num_labels <= CODE_LABELS else "IVF,PQx4"


FLAT = IndexSpec()
"""Exact search."""
