"""What papers published for eight data sets (published/*.yaml): as params.yaml, beside measured
figures, tried out.

    python benchmarks/published.py list
    python benchmarks/published.py params LF-AmazonTitles-131K --method unidec-v2-bce \\
        --out params.yaml
    python benchmarks/published.py compare LF-AmazonTitles-131K outputs/metrics.json \\
        --method unidec-v2-bce
    python benchmarks/published.py stand-in LF-AmazonTitles-131K --share 0.01

`params` expects the raw files as they come from the XMC repository in `data/raw/<data set>`.
`stand-in` makes synthetic raw files of a data set's size and runs every stage on them; `all` names
all data sets. It ends with 1 if one failed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from unidec.config import Params, build_params, nearest, read_yaml, to_yaml
from unidec.data.storage import write_bytes_atomic
from unidec.errors import ConfigError, UnidecError

FOLDER = Path(__file__).resolve().parent / "published"
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
FURTHER = {"Query2Bid-450M": ("P@1", "P@3", "P@5", "P@10")}  # metrics of other data sets
NOT_PUBLISHED = "not published"
Facts = dict[str, Any]


def names() -> list[str]:
    """Data sets that have a file."""
    return sorted(path.stem for path in FOLDER.glob("[A-Z]*.yaml"))


@cache
def methods() -> Facts:
    """published/methods.yaml: `sources`, `methods`, and the `settings` of all data sets."""
    return read_yaml(FOLDER / "methods.yaml")[0]


@cache
def data_set(name: str) -> Facts:
    """A data set's file: `facts`, `silent`, `methods`, `not_published`, `settings`, `figures`.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in names():
        near = nearest(name, names())
        raise ConfigError(
            "nothing is kept of this data set",
            where=str(FOLDER),
            got=name,
            expected=", ".join(names()),
            fix=f"did you mean {near}?" if near else None,
        )
    return read_yaml(FOLDER / f"{name}.yaml")[0]


def metrics(name: str) -> tuple[str, ...]:
    """Metrics of a data set's figures."""
    return FURTHER.get(name, METRICS)


def other_figures(name: str) -> list[Facts]:
    """Figures of systems whose settings are not kept (published/figures.yaml): `method`, `source`
    and metrics.
    """
    rows = []
    for source, table in read_yaml(FOLDER / "figures.yaml")[0].get(name, {}).items():
        for system, *values in table:
            found = zip(metrics(name), values, strict=True)
            given = {metric: value for metric, value in found if value is not None}
            rows.append({"method": system, "source": source} | given)
    return rows


def groups(name: str, method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings of a method on a data set, as (source, values by key path); later ones override
    earlier ones.

    Raises:
        ConfigError: no such data set, or the method was not published for it.
    """
    own = data_set(name)
    if method not in own["methods"]:
        fix = (
            f"another --method; {NOT_PUBLISHED} for {name}: "
            f"{', '.join(own['not_published']) or 'none of them'}"
        )
        raise ConfigError(
            "no such method", where=name, got=method, expected=", ".join(own["methods"]), fix=fix
        )
    every = [*methods()["settings"], *own["settings"]]
    base = methods()["methods"][method].get("settings_of", method)
    chosen = [group for group in every if base in group.get("methods", [base])]
    if base != method:
        chosen += [group for group in every if method in group.get("methods", [])]
    for group in chosen:
        values = {
            f"{at}.{key}": value for at, keys in group["set"].items() for key, value in keys.items()
        }
        commit = f", commit {group['commit']}" if "commit" in group else ""
        yield group["source"] + commit, values


def resolve(name: str, method: str, others: Mapping[str, Any] | None = None) -> Params:
    """All parameters of a method on a data set: its recipe, what was published, then `others` by
    key path.

    Raises:
        ConfigError: as `groups`; or values that the project's parameters refuse.
    """
    values = (
        {"recipe": methods()["methods"][method]["recipe"]} if method in methods()["methods"] else {}
    )
    values["data.path"] = f"data/raw/{name}"
    for _, given in groups(name, method):
        values |= given
    return build_params(values | dict(others or {}), {}, f"{FOLDER.name}/{name}.yaml, {method}")


def params_yaml(name: str, method: str, others: Mapping[str, Any] | None = None) -> str:
    """A whole params.yaml, whose head says where each value comes from, and what was
    not published.
    """
    about = methods()["methods"][method]
    source_of = {}
    params = resolve(name, method, others)
    for source, values in groups(name, method):
        source_of |= dict.fromkeys(values, source)
    lines = [
        f"{name}, {method}: {about['what']}.",
        f"Differs from it: {about['differs']}.",
        "Sources:",
    ]
    for source in dict.fromkeys(source_of.values()):
        keys = ", ".join(key for key, own in source_of.items() if own == source)
        lines.append(f"  {source}: {keys}")
    lines.append(
        f"Other keys have the values of recipe {about['recipe']} (unidec/recipes), or their "
        "defaults."
    )
    lines += [f"The sources are silent on: {text}" for text in data_set(name)["silent"]]
    return (
        "".join(f"# {line}\n" for line in lines) + f"recipe: {about['recipe']}\n" + to_yaml(params)
    )


def comparison(name: str, measured: Mapping[str, Any], method: str | None = None) -> list[str]:
    """Lines of a table: published figures, what `unidec evaluate` measured, and the difference, in
    points.

    Args:
        measured: outputs/metrics.json; `test` is compared with a method's figures, `de` and `clf`
            with those of its heads alone.
        method: whose figures; None: all that were published for the data set, and below them those
            of other systems.
    """
    shown = metrics(name)
    lines = [
        "| method | figures | " + " | ".join(shown) + " |",
        "|---|---|" + "---|" * len(shown),
    ]
    figures = [row for row in data_set(name)["figures"] if method in (None, row["method"])]
    for row in figures:
        part = row.get("of", "test")
        ours = measured.get(part, {})
        title = row["method"] + (f", {part} alone" if part != "test" else "")
        lines.append(
            _line(
                title, f"published: {row['source']}", [row.get(metric) for metric in shown], ".2f"
            )
        )
        lines.append(_line("", "measured", [ours.get(metric) for metric in shown], ".2f"))
        both = [(ours.get(metric), row.get(metric)) for metric in shown]
        points = [
            own - theirs if own is not None and theirs is not None else None for own, theirs in both
        ]
        lines.append(_line("", "difference", points, "+.2f"))
    for row in [] if method else other_figures(name):
        values = [row.get(metric) for metric in shown]
        lines.append(_line(row["method"], f"published: {row['source']}", values, ".2f"))
    if not figures:
        lines = [f"{name}: figures of {method} are {NOT_PUBLISHED} in the sources used here"]
    return lines


def _line(title: str, what: str, values: list[float | None], form: str) -> str:
    cells = ["-" if value is None else format(value, form) for value in values]
    return f"| {title} | {what} | " + " | ".join(cells) + " |"


def overview() -> list[str]:
    """Lines of a table: which methods each data set has, and whether their figures are known."""
    known = list(methods()["methods"])
    lines = ["| data set | " + " | ".join(known) + " |", "|---|" + "---|" * len(known)]
    for name in names():
        own = data_set(name)
        with_figures = {row["method"] for row in own["figures"]}
        words = [
            NOT_PUBLISHED
            if method not in own["methods"]
            else "figures"
            if method in with_figures
            else "settings"
            for method in known
        ]
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    return lines


def _read_metrics(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        fix = "run `unidec evaluate`, which writes outputs/metrics.json"
        raise ConfigError(
            "no metrics can be read", where=str(path), got=str(error), fix=fix
        ) from error


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="data sets and methods")
    known = list(methods()["methods"])
    for command, about in (
        ("params", "write a params.yaml"),
        ("compare", "published figures beside measured ones"),
        ("stand-in", "run every stage on synthetic data of a data set's size"),
    ):
        one = commands.add_parser(command, help=about)
        one.add_argument("data_set", help="; ".join(names()))
        if command == "params":
            one.add_argument("--method", choices=known, required=True)
            one.add_argument("--out", type=Path, required=True, help="the file to write")
            one.add_argument("--data-path", help="folder of raw files (data/raw/<data set>)")
        elif command == "compare":
            one.add_argument("metrics", type=Path, help="outputs/metrics.json")
            one.add_argument("--method", choices=known, help="one alone")
        else:
            one.add_argument(
                "--method",
                choices=known,
                help="default: unidec-v2-bce, or the first that was published",
            )
            one.add_argument(
                "--share", type=float, default=0.01, help="of the queries and of the labels (0.01)"
            )
            one.add_argument("--steps", type=int, default=20, help="training steps")
            one.add_argument("--batch", type=int, default=64, help="queries a batch at most (64)")
            one.add_argument("--encoder", help="a transformer in place of a small random one")
            one.add_argument(
                "--until",
                default="evaluate",
                metavar="STAGE",
                help="the last stage: ingest, tokens, ...",
            )
            one.add_argument(
                "--folder", type=Path, help="where to work, kept; default: a temporary one"
            )
            one.add_argument("--output", type=Path, help="also write the table here")
            one.add_argument("--minutes", type=float, help="the stage in progress ends then")
    return top


def main() -> int:
    """The command line; gives the exit code."""
    given = parser().parse_args()
    if given.command == "list":
        print("\n".join(overview()))
    elif given.command == "params":
        others = {"data.path": given.data_path} if given.data_path else {}
        write_bytes_atomic(given.out, params_yaml(given.data_set, given.method, others).encode())
        print(
            f"{given.out}: {given.method} on {given.data_set}; next: unidec config check, "
            "make train"
        )
    elif given.command == "compare":
        print("\n".join(comparison(given.data_set, _read_metrics(given.metrics), given.method)))
    else:
        import stand_in

        return stand_in.run(given)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UnidecError as error:
        sys.exit(str(error))
