"""Comparison files: errors are reported at once; what is right becomes jobs in a good order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from unidec.comparison.jobs import slug
from unidec.comparison.workspace import Comparison, load_comparison, select
from unidec.config import Params, by_key_path, load_params, nested, recipe_names
from unidec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path for path in (ROOT / "comparison").glob("*.yaml") if path.name != "tune.yaml")

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a comparison file beside a folder of raw data, `raw`."""
    (tmp_path / "raw").mkdir()
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "comparison.yaml"
        path.write_text(text)
        return path

    return write


HEAD = "name: t\ndata:\n  d: {path: raw}\n"


def problems(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_comparison(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def selected(comparison: Comparison, *only: str) -> list[str]:
    """Names of the cells, without the steps of data sets."""
    return [
        comparison.jobs[step.name].cell
        for step in select(comparison, only)
        if step.name in comparison.jobs
    ]


# -- right ones
# --------------------------------------------------------------------------------------------------


def test_jobs_have_the_recipes_values_under_common_data_and_cell(write: Write) -> None:
    path = write(
        "name: t\nseeds: [3, 5]\n"
        "common: {pool: {beta: 7, eta: 5}, optim.epochs: 9}\n"
        "data:\n"
        "  short: {path: raw, max_length: 16}\n"
        "  long: {path: raw, text: title+content, max_length: 64, set: {pool.eta: 4, data: "
        "{propensity_a: 0.6}}}\n"
        "cells:\n"
        "  one: {recipe: depsl, set: {pool.beta: 2}}\n"
        "  two: {like: one, set: {model.dim: 64}}\n"
        "  kNN: {peer: knn}\n"
    )
    comparison = load_comparison(path)
    assert list(comparison.jobs) == [
        "short/one/3",
        "short/two/3",
        "short/kNN/3",
        "long/one/3",
        "long/two/3",
        "long/kNN/3",
        "short/one/5",
        "short/two/5",
        "long/one/5",
        "long/two/5",  # kNN has no seed
    ]
    recipe = load_params(write("recipe: depsl\n")).model_dump()
    expected = recipe | {
        "seed": 5,
        "data": recipe["data"] | {"path": "raw", "propensity_a": 0.6},
        "tokens": {"text": "title+content", "max_length": 64},
        "model": recipe["model"] | {"dim": 64},
        "pool": recipe["pool"] | {"beta": 2, "eta": 4},
        "optim": recipe["optim"] | {"epochs": 9},
        "tracking": recipe["tracking"] | {"experiment": "unidec-compare"},
    }
    assert comparison.jobs["long/two/5"].params.model_dump() == expected
    assert comparison.jobs["long/two/5"].settings == {"pool.beta": 2, "model.dim": 64}
    peer = comparison.jobs["short/kNN/3"]
    assert peer.kind == "peer"
    assert peer.peer == "knn"
    assert peer.params.optim.epochs == 9


def test_what_a_cell_needs_comes_before_it(write: Write) -> None:
    path = write(
        HEAD + "cells:\n"
        "  first: {recipe: ngame}\n"
        "  second: {recipe: ngame-classifier, after: first}\n"
        "  votes: {model_of: second, set: {index.knn_weight: 0.5}}\n"
        "  third: {like: second, set: {pool.beta: 1}}\n"
        "  peer: {peer: xr-linear-vectors, after: first}\n"
    )
    comparison = load_comparison(path)
    needs = {
        "first": "",
        "second": "d/first/0",
        "votes": "d/second/0",
        "third": "d/first/0",
        "peer": "d/first/0",
    }
    assert {j.cell: j.needs for j in comparison.jobs.values()} == needs
    order = list(comparison.jobs)
    assert all(
        order.index(j.needs) < order.index(j.key) for j in comparison.jobs.values() if j.needs
    )
    second = comparison.jobs["d/second/0"]
    votes = comparison.jobs["d/votes/0"]
    assert (
        second.params.encoder.start == "data/start"
        and not comparison.jobs["d/peer/0"].params.encoder.start
    )
    assert "data/start" in comparison.steps["d/peer/0"].spec["links"]
    assert (votes.kind, votes.params.index.knn_weight) == ("model_of", 0.5)
    without = {"encoder": {"start"}, "index": True}
    assert votes.params.model_dump(exclude=without) == second.params.model_dump(exclude=without)
    assert selected(comparison, "votes") == ["first", "second", "votes"]
    assert selected(comparison, "d/first") == ["first"]
    assert selected(comparison, "*/third/0", "first") == ["first", "third"]
    assert len(selected(comparison)) == len(comparison.jobs)


def test_some_cells_have_more_seeds(write: Write) -> None:
    cells = (
        "cells:\n  first: {recipe: ngame, seeds: [0, 2]}\n"
        "  second: {recipe: ngame-classifier, after: first, seeds: [2]}\n"
        "  third: {recipe: depsl}\n  like: {like: first}\n  kNN: {peer: knn}\n"
    )
    jobs = list(load_comparison(write(HEAD + cells)).jobs)
    assert jobs == [
        "d/first/0",
        "d/third/0",
        "d/like/0",
        "d/kNN/0",
        "d/first/2",
        "d/second/2",
        "d/like/2",
    ]
    found = problems(write(HEAD + cells.replace("seeds: [2]", "seeds: [2, 3]")))
    assert "cells.second.seeds" in found and "not seeds of the cell that it builds on" in found


def test_set_from_the_command_line_goes_over_everything(write: Write) -> None:
    path = write(HEAD + "cells:\n  a: {recipe: depsl, set: {pool.beta: 2}}\n")
    assert load_comparison(path, {"pool.beta": 4}).jobs["d/a/0"].params.pool.beta == 4
    with pytest.raises(
        ConfigError, match=r"pool\.betta \(--set\): unknown key[\s\S]*nearest: pool\.beta"
    ):
        load_comparison(path, {"pool.betta": 4})


def test_overrides_nested_or_by_key_path() -> None:
    assert by_key_path({"pool": {"beta": 2}, "pool.eta": 1, "loss": {}, "optim": None}) == {
        "pool.beta": 2,
        "pool.eta": 1,
    }
    assert nested({"pool.beta": 2, "seed": 0}) == {"pool": {"beta": 2}, "seed": 0}
    assert slug("UniDEC + Gandalf (25 %)") == "unidec-gandalf-25" and slug("%") == "x"


# -- wrong ones
# --------------------------------------------------------------------------------------------------


def test_every_unknown_key_and_wrong_value_is_reported_with_its_line(write: Write) -> None:
    said = problems(
        write(
            "name: T\n"
            "seed: [0]\n"
            "data:\n"
            "  d: {path: raw, texts: title, max_length: 1}\n"
            "  e: {text: title}\n"
            "cells:\n"
            "  a: {recipe: depsl, set: 3}\n"
        )
    )
    for part in (
        "comparison.yaml: 6 problems in the comparison file",
        "seed (line 2): unknown key",
        "nearest: seeds",
        "data.d.texts (line 4): unknown key",
        "nearest: text",
        "data.d.max_length (line 4): wrong value",
        "expected: greater than or equal to 3",
        "data.e.path (line 5): missing",
        "cells.a.set (line 7): wrong value",
        "name (line 1): wrong value",
    ):
        assert part in said, f"{part!r} is missing in:\n{said}"
    assert "Traceback" not in said


def test_every_wrong_name_and_parameter_is_reported_with_its_line(write: Write) -> None:
    said = problems(
        write(
            "name: t\n"
            "common: {optim: {epoch: 3}}\n"
            "data:\n"
            "  d: {path: rav}\n"
            "cells:\n"
            "  a: {recipe: depls}\n"
            "  b: {recipe: dpr, set: {pool: {beta: 0}}}\n"
            "  c: {like: bb}\n"
            "  e: {recipe: dpr, peer: knn}\n"
            "  f: {peer: xr-lineer}\n"
            "groups:\n"
            "  G: {base: b, cells: [z]}\n"
        )
    )
    for part in (
        "comparison.yaml: 8 problems in the comparison file",
        "optim.epoch (line 2, common): unknown key",
        "nearest: optim.epochs",
        "data.d.path (line 4): no such folder",
        "cells.a.recipe (line 6): no such recipe",
        "nearest: depsl",
        "pool.beta (line 7, cells.b.set): wrong value",
        "expected: greater than or equal to 1",
        "cells.c.like (line 8): no such cell",
        "cells.e (line 9): requires one source",
        "cells.f.peer (line 10): no such peer",
        "nearest: xr-linear",
        "groups.G.cells (line 12): no such cell",
    ):
        assert part in said, f"{part!r} is missing in:\n{said}"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ("{}", "at least 1"),
        ("a: {}", "requires one source"),
        ("a: {recipe: depsl, set: {tokens.max_length: 8}}", "must be the same for all cells"),
        ("a: {recipe: depsl, set: {seed: 8}}", "must be the same for all cells"),
        (
            "a: {recipe: unidec-v2, set: {index: {fusion: true}}}",
            "the fusion requires the votes by words",
        ),
        ("a: {like: b}\n  b: {like: a}", "cells.a.like (line 5): no such cell above this one"),
        ("a: {like: a}", "no such cell above this one"),
        ("a: {recipe: ngame, after: b}\n  b: {recipe: ngame}", "no such cell above this one"),
        ("a: {peer: knn}\n  b: {recipe: depsl, after: a}", "has no model of its own"),
        ("a: {peer: knn}\n  b: {model_of: a}", "has no model of its own"),
        ("a: {peer: knn, set: {pool.beta: 1}}", "a peer takes no parameters"),
        ("a: {recipe: depsl}\n  b: {peer: knn, after: a}", "no `after`"),
        ("a: {peer: xr-linear-vectors}", "the cell whose text vectors it reads"),
        (
            "a: {recipe: unidec}\n  b: {model_of: a, set: {pool.beta: 1}}",
            "would require another training",
        ),
        ("a/b: {recipe: depsl}", "match pattern"),
        ("a: {recipe: depsl, set: 3}", "wrong value"),
        ("a: {recipe: depsl}\nseeds: [-1]", "greater than or equal to 0"),
    ],
)
def test_one_thing_wrong(write: Write, cells: str, words: str) -> None:
    body = f"cells: {cells}\n" if cells == "{}" else f"cells:\n  {cells}\n"
    assert words in problems(write(HEAD + body))


def test_no_file_no_folder_no_cell(write: Write) -> None:
    with pytest.raises(ConfigError, match="no such comparison file"):
        load_comparison("nothing.yaml")
    path = write("name: t\ndata:\n  d: {path: nowhere}\ncells:\n  a: {recipe: depsl}\n")
    assert "data.d.path (line 3): no such folder" in problems(path)
    comparison = load_comparison(write(HEAD + "cells:\n  classifier: {recipe: renee}\n"))
    with pytest.raises(ConfigError, match=r"no such cell[\s\S]*one of classifier"):
        select(comparison, ["clasifier"])


def test_an_optional_data_set_is_skipped_where_its_folder_is_missing(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    cells = "cells:\n  a: {recipe: depsl}\n"
    comparison = load_comparison(write(HEAD + "  e: {path: nowhere, optional: true}\n" + cells))
    assert {job.data for job in comparison.jobs.values()} == {"d"}
    assert set(comparison.file.data) == {"d"}
    assert "data set e is skipped: no folder nowhere" in caplog.text
    Path("nowhere").mkdir()
    data_sets = {job.data for job in load_comparison("comparison.yaml").jobs.values()}
    assert data_sets == {"d", "e"}
    path = write("name: t\ndata:\n  d: {path: missing, optional: true}\n" + cells)
    with pytest.raises(ConfigError, match=r"no data set of this comparison exists[\s\S]*got: d"):
        load_comparison(path)


# -- shipped ones
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_comparisons_are_valid(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lf-wordnet is not in every checkout
    for entry in yaml.safe_load(path.read_text())["data"].values():
        (tmp_path / entry["path"]).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    comparison = load_comparison(
        path, tune="tuning" in yaml.safe_load(path.read_text())
    )  # what was chosen may be of other trials
    assert comparison.file.name == path.stem
    assert comparison.file.title
    assert comparison.file.about
    defaults = Params().model_dump()
    assert all(j.params.model_dump() != defaults for j in comparison.jobs.values())
    used = {job.cell for job in comparison.jobs.values()}
    kinds = {"recipe", "trial"}
    assert used >= {
        name for name, cell in comparison.file.cells.items() if cell.recipe or cell.like
    }
    assert used == set(comparison.file.cells) or comparison.file.tuning is not None
    if path.stem in ("small", "fair"):
        recipes = {job.params.recipe for job in comparison.jobs.values() if job.kind in kinds}
        # unidec-long is unidec on another text and encoder, which a comparison says for all alike;
        # unidec-taught has its teacher from a GPU; unidec-matryoshka is unidec at several widths;
        # depsl-words is depsl with a layer for queries, a teacher and more epochs
        others = {"unidec-long", "unidec-taught", "unidec-matryoshka", "depsl-words"}
        assert recipes == {name for name in recipe_names() if "gpu" not in name} - others
