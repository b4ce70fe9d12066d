"""Labels found by the beginning of their uid, their title, or a word in it: for filters on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle

_ROWS = 65_536  # looked at in one go: a common beginning is found without reading all labels


class LabelSearch:
    """Lower-cased copies of uids and titles, made once; `find` reads them.

    Args:
        bundle: only its label columns are kept.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.uids, self.titles = bundle.uids, bundle.titles
        self._uids, self._titles = pc.utf8_lower(self.uids), pc.utf8_lower(self.titles)

    def find(self, beginning: str, limit: int) -> tuple[list[dict[str, str]], bool]:
        """At most `limit` labels {"uid", "title"}, and whether there are more.

        First those whose uid or title begins so, then those with a word that does, each in the order of rows; upper
        and lower case are one.
        """
        wanted, words = beginning.lower(), " " + beginning.lower()
        rows = self._rows(
            limit + 1, lambda uids, titles: pc.or_(pc.starts_with(uids, wanted), pc.starts_with(titles, wanted))
        )
        if len(rows) <= limit and wanted:
            known = set(rows)
            within = self._rows(limit + 1 + len(known), lambda uids, titles: pc.match_substring(titles, words))
            rows += [row for row in within if row not in known]
        found = [{"uid": self.uids[row].as_py(), "title": self.titles[row].as_py()} for row in rows[:limit]]
        return found, len(rows) > limit

    def _rows(self, limit: int, matches: Any) -> list[int]:
        """The first `limit` rows that match."""
        rows: list[int] = []
        for start in range(0, len(self.uids), _ROWS):
            mask: pa.Array = matches(self._uids.slice(start, _ROWS), self._titles.slice(start, _ROWS))
            found = pc.indices_nonzero(mask)[: limit - len(rows)]
            rows += [start + row for row in found.to_pylist()]
            if len(rows) >= limit:
                break
        return rows
