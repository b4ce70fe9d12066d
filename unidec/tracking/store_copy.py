"""A tracking store into another database, whole: SQLite to PostgreSQL when a team grows, or back.

Both databases have the tables of the MLflow that is installed; rows are copied table by table, in one transaction.
Addresses of artifacts are rewritten: files beside SQLite, `mlflow-artifacts:/` behind a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from unidec.errors import ConfigError
from unidec.tracking.store import artifact_location, open_client, quiet_mlflow, sqlite_path

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, MetaData, Table

_ROWS = 1000
_REVISION = "alembic_version"
_HOLD = ("runs", "registered_models")  # a store with a row in one of these is in use
_SERVED = "mlflow-artifacts:"


def copy_store(source: str, target: str, artifacts: str | None = None) -> dict[str, Any]:
    """Copies runs, metrics, artifacts' addresses, registered models and aliases; the source is only read.

    Args:
        source: `sqlite:///...` or `postgresql://...`, which nobody writes to meanwhile.
        target: the same; empty, or as MLflow makes it.
        artifacts: how the source's addresses of files begin; default: beside SQLite's file, or a server's.

    Returns:
        {"runs", "metrics", "models" (versions), "rows", "artifacts": {"from", "to"}}: the files themselves are to be
        copied by whoever can reach both places.

    Raises:
        ConfigError: an address is no database, the source is another MLflow's, or the target is in use.
    """
    for uri in (source, target):
        if not uri.startswith(("sqlite:///", "postgresql")):
            raise ConfigError("not a tracking database", where="copy-store", got=uri,
                              expected="sqlite:///... or postgresql://...")  # fmt: skip
    path = sqlite_path(source)
    if path is not None and not path.is_file():
        raise ConfigError("no tracking database here", where=str(path), fix="name the one that has the runs")
    quiet_mlflow()
    prefixes = ((artifacts or artifact_location(source) or _SERVED).rstrip("/"), artifact_location(target) or _SERVED)
    engines = [_prepared(source, prefixes[0]), _prepared(target, prefixes[1])]
    try:
        counts = _copy(engines[0], engines[1], prefixes)
    finally:
        for engine in engines:
            engine.dispose()
    return {
        "runs": counts.get("runs", 0), "metrics": counts.get("metrics", 0), "models": counts.get("model_versions", 0),
        "rows": sum(counts.values()), "artifacts": {"from": prefixes[0], "to": prefixes[1]},
    }  # fmt: skip


def _prepared(uri: str, artifacts: str) -> Engine:
    """An engine for a store that has its tables."""
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    if sqlite_path(uri) is None:
        SqlAlchemyStore(uri, artifacts).engine.dispose()
    open_client(uri)  # an older or newer MLflow's is refused by name
    return create_sqlalchemy_engine(uri)


def _copy(source: Engine, target: Engine, prefixes: tuple[str, str]) -> dict[str, int]:
    """Every row of every table; the number of rows of each."""
    from sqlalchemy import delete, func, insert, select

    old, new = _tables(source), _tables(target)
    counts: dict[str, int] = {}
    with source.connect() as reading, target.begin() as writing:
        held = [name for name in _HOLD if writing.scalar(select(func.count()).select_from(new.tables[name]))]
        if held:
            raise ConfigError("the target holds runs or models already", where=str(target.url), got=", ".join(held),
                              fix="name a new, empty database")  # fmt: skip
        for table in reversed(new.sorted_tables):
            if table.name != _REVISION:
                writing.execute(delete(table))
        for table in new.sorted_tables:
            if table.name == _REVISION or table.name not in old.tables:
                continue
            counts[table.name] = 0
            for rows in _rows(reading, old.tables[table.name], prefixes):
                writing.execute(insert(table), rows)
                counts[table.name] += len(rows)
            _go_on_counting(writing, table)
            stored = writing.scalar(select(func.count()).select_from(table))
            if stored != counts[table.name]:  # nothing is committed then
                raise ConfigError("a table was not copied whole", where=table.name, got=str(stored),
                                  expected=str(counts[table.name]), fix="stop whoever writes to it")  # fmt: skip
    return counts


def _tables(engine: Engine) -> MetaData:
    from sqlalchemy import MetaData

    found = MetaData()
    found.reflect(engine)
    return found


def _rows(reading: Connection, table: Table, prefixes: tuple[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Rows of a table, some at a time, with the addresses of artifacts as the target has them."""
    from sqlalchemy import select

    before, after = prefixes
    for rows in reading.execution_options(stream_results=True).execute(select(table)).mappings().partitions(_ROWS):
        yield [{name: _moved(value, before, after) for name, value in row.items()} for row in rows]


def _moved(value: Any, before: str, after: str) -> Any:
    if not isinstance(value, str) or not (value == before or value.startswith(f"{before}/")):
        return value
    rest = value.removeprefix(before).lstrip("/")
    return f"{after}/{rest}" if rest or after == _SERVED else after


def _go_on_counting(writing: Connection, table: Table) -> None:
    """PostgreSQL numbers new rows by a sequence, which copied rows did not move on."""
    from sqlalchemy import text

    if writing.dialect.name != "postgresql":
        return
    for column in table.columns:
        sequence = writing.scalar(
            text("select pg_get_serial_sequence(:table, :column)"),
            {"table": f'"{table.name}"', "column": column.name},
        )
        if sequence:
            newest = text(f'select setval(:name, coalesce(max("{column.name}"), 0) + 1, false) from "{table.name}"')
            writing.execute(newest, {"name": sequence})
