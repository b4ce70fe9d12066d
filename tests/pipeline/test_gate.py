"""The gate on real bundles in a real registry: every reason, who is compared with whom, what is
written down.

Fresh processes are asked in tests/bundle/test_probe.py and tests/faults/test_worse_challenger.py;
here they are played by this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.gated_registry import GatedRegistry, make_raw

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.bundle.probe import Probe
from unidec.config import Validation
from unidec.data.dataset import XMCDataset
from unidec.errors import ArtifactError, ConfigError, Refused
from unidec.pipeline import gating
from unidec.tracking.provenance import code_tags


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    memory = Path("/dev/shm")  # many small commits
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def world(store, tmp_path, monkeypatch, request):
    world = GatedRegistry(tmp_path, store, re.sub(r"\W", "-", request.node.name).strip("-"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", world.uri)
    world.data()
    return world


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """Fresh processes without the process; `played["p95_ms"] = 3.0` for all, or {sha256: 3.0}."""
    times = dict.fromkeys(("load_seconds", "load_cpu_seconds", "p50_ms"), 1.0)
    times |= {"p95_ms": 2.0, "p95_cpu_ms": 2.0, "peak_megabytes": 100.0}

    def probe(path, texts, k, timeout, **_options):
        bundle = Bundle.load(path)
        size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()) / 1e6
        mine = {
            name: v.get(bundle.sha256, 2.0) if isinstance(v, dict) else v
            for name, v in times.items()
        }
        return Probe(sha256=bundle.sha256, megabytes=size, **mine)

    monkeypatch.setattr(gating, "probe_bundle", probe)
    return times


def failed(result) -> list[str]:
    return [reason.check for reason in result.reasons if not reason.passed]


def test_from_the_first_model_to_one_that_takes_its_place(world):
    params = world.params()
    first = world.version(world.bundle("first", wrong=range(0, 60, 4)))
    assert pipeline.needs_gate(params, first)
    result = pipeline.gate(params)
    assert result.passed and result.challenger == first and result.champion is None
    assert [r.check for r in result.reasons] == ["code", "hash", "loads"]
    assert result.metrics == {}  # no champion to compare with
    pipeline.promote(params, first)
    assert world.aliases() == {"champion": first, "challenger": first}
    assert not pipeline.needs_gate(params, first)
    again = pipeline.gate(params)
    assert again.already and again.passed and failed(again) == []

    better = world.version(world.bundle("better", wrong=range(0, 60, 30)))
    result = pipeline.gate(params)
    assert result.passed, result.reasons
    assert result.champion == first and result.metrics["challenger"]["P@1"] == pytest.approx(
        100 * 58 / 60
    )
    assert result.metrics["champion"]["P@1"] == pytest.approx(75)
    assert pipeline.promote(params).previous == first
    assert world.aliases() == {"champion": better, "previous": first, "challenger": better}


def test_a_worse_one_is_refused_and_every_reason_is_kept(world):
    params = world.params()
    champion = world.version(world.bundle("champion"), alias="champion")
    worse = world.version(world.bundle("worse", wrong=range(0, 60, 5)))
    result = pipeline.gate(params)
    assert not result.passed
    assert set(failed(result)) == {
        "nDCG@5",
        "confidence",
        "P@1",
        "PSP@5",
        "tail/R@10",
        "coverage@5",
    } & set(failed(result))
    assert {"nDCG@5", "confidence", "P@1"} <= set(failed(result))
    tags = world.tags(worse)
    assert tags["gate.passed"] == "false" and tags["gate.champion"] == champion
    assert tags["gate.failed"] == ", ".join(failed(result))
    assert len(tags["gate.reasons"].splitlines()) == len(result.reasons)
    assert "FAIL nDCG@5: " in tags["gate.reasons"] and "pass loads: " in tags["gate.reasons"]
    assert json.loads(tags["gate.metrics"])["P@1"] == pytest.approx(80)
    kept = json.loads(Path("outputs/gate.json").read_text())
    assert (
        kept["reasons"] == [asdict(one) for one in result.reasons]
        and kept["comparison"]["worse"] == 48
        and kept["comparison"]["better"] == 0
    )
    page = Path(result.page).read_text()
    assert (
        f"version {worse} refused" in page
        and "FAIL" in page
        and "report.html" in page
        and "<script" not in page
    )
    with pytest.raises(Refused, match="did not pass the gate"):
        pipeline.promote(params)
    assert world.aliases()["champion"] == champion
    # as things are it stays refused; other settings, other data or another champion are another
    # question
    assert not pipeline.needs_gate(params, worse)
    assert pipeline.needs_gate(world.params(margin=-30.0), worse)


def split_changed(world, num_seen: int, num_test: int = 60) -> tuple[list[str], list[str]]:
    """New data whose test queries are named as the champion's training queries were: of the first
    `num_seen`, the texts are the same. Returns the texts that the champion and that the challenger
    were trained on.
    """
    raw = make_raw(num_test=num_test)
    test = raw.queries["test"]
    titles = [f"{title} v{row}" for row, title in enumerate(test["title"].to_pylist())]
    test = test.set_column(1, "title", pa.array(titles, pa.large_string()))
    world.data(replace(raw, queries={**raw.queries, "test": test}))
    return titles[:num_seen], raw.queries["train"]["title"].to_pylist()


def test_a_split_that_changed_is_judged_on_queries_that_neither_has_seen(world):
    before, now = split_changed(world, 40, 160)
    # right about what it was trained on, wrong about many others
    champion = world.bundle("champion", wrong=range(40, 60, 2), trained_on=before)
    world.version(champion, alias="champion")
    challenger = world.version(world.bundle("challenger", wrong=[40], trained_on=now))
    result = pipeline.gate(world.params(confidence=0.0))
    [check] = [reason for reason in result.reasons if reason.check == "unseen queries"]
    assert check.passed and check.got == 120 and result.passed, result.reasons
    assert "the champion was trained on 40 of the 160 test queries" in check.words
    assert "the challenger was trained on 0 of the 160 test queries" in check.words
    assert "both are judged on the 120 that neither has seen" in check.words
    kept = json.loads(Path("outputs/gate.json").read_text())
    assert (
        kept["seen"] == {"challenger": 0, "champion": 40}
        and kept["comparison"]["num_queries"] == 120
    )
    page = " ".join(Path(result.page).read_text().split())
    assert "120 of 160 test queries" in page
    assert "The champion was trained on 40 of them, which are left out" in page
    assert pipeline.promote(world.params(), challenger).version == challenger


@pytest.mark.parametrize("who", ["champion", "challenger"])
def test_too_few_unseen_queries_are_no_verdict_unless_that_is_accepted(world, who):
    seen, other = split_changed(world, 45)
    trained_on = {"champion": other, "challenger": other} | {who: seen}
    world.version(
        world.bundle("champion", wrong=[1], trained_on=trained_on["champion"]), alias="champion"
    )
    world.version(world.bundle("challenger", trained_on=trained_on["challenger"]))
    result = pipeline.gate(world.params())
    assert failed(result) == ["unseen queries"] and result.metrics == {}
    words = result.reasons[-1].words
    assert (
        f"the {who} was trained on 45 of the 60 test queries" in words
        and "only 15 are left" in words
    )
    page = Path(result.page).read_text()
    assert (
        "Name a test split that neither model was trained on" in page
        and "train longer" not in page.lower()
    )
    accepted = world.params(confidence=0.0).model_copy(
        update={"validation": Validation(test_texts_in_train="warn")}
    )
    assert pipeline.needs_gate(accepted, "challenger")
    result = pipeline.gate(accepted)
    assert (
        result.metrics
        and "all are judged on, which validation.test_texts_in_train: warn accepts"
        in next(reason.words for reason in result.reasons if reason.check == "unseen queries")
    )


def test_what_an_older_bundle_was_trained_on_is_said_to_be_unknown(world):
    _, now = split_changed(world, 0)
    world.version(world.bundle("champion", wrong=[1]), alias="champion")
    world.version(world.bundle("challenger", trained_on=now))
    result = pipeline.gate(world.params(confidence=0.0))
    [check] = [reason for reason in result.reasons if reason.check == "unseen queries"]
    assert check.passed and "which queries the champion was trained on is unknown" in check.words
    page = Path(result.page).read_text()
    assert "Which queries the champion was trained on is unknown." in page


def test_copies_of_old_bundles_make_room(world, monkeypatch):
    monkeypatch.setattr(gating, "_KEPT_COPIES", 2)
    world.version(world.bundle("champion", wrong=[1, 2]), alias="champion")
    pipeline.gate(world.params(), world.version(world.bundle("a", wrong=[3, 4])))
    for i, name in enumerate(("old", "older", "oldest")):
        (Path("runs/bundles") / name).mkdir()
        os.utime(Path("runs/bundles") / name, (1000 - i, 1000 - i))
    version = world.version(world.bundle("b"))
    pipeline.gate(world.params(), version)
    left = {path.name for path in Path("runs/bundles").iterdir() if path.is_dir()}
    compared = {
        world.tags(number)["bundle.sha256"][:16]
        for number in (world.aliases()["champion"], version)
    }
    assert compared <= left and not {"old", "older", "oldest"} & left and len(left) == 3


def test_labels_meet_by_uid_a_new_one_is_a_miss_a_removed_one_leaves_the_answer(world):
    # labels 6 to 65: 0 to 5 are gone, 60 to 65 are new
    raw = make_raw(first=6)
    world.data(raw)
    world.version(world.bundle("old", labels=range(60)), alias="champion")
    world.version(world.bundle("new", labels=reversed(range(6, 66))))  # in another order
    result = pipeline.gate(world.params())
    assert result.passed
    assert result.metrics["challenger"]["P@1"] == 100.0
    assert result.metrics["champion"]["P@1"] == pytest.approx(90.0)  # right about 54 of 60 labels
    kept = json.loads(Path("outputs/gate.json").read_text())
    assert kept["labels"] == {
        "challenger": {"unknown": 0, "removed": 0},
        "champion": {"unknown": 6, "removed": 6},
    }
    assert "does not know 6 labels" in Path(result.page).read_text()


def test_rankings_beside_a_slow_reference_filter_pairs_left_out(world, monkeypatch):
    monkeypatch.setattr(gating, "K", 7)
    place = world.bundle("one", wrong=range(3), labels=[*range(50), 90, 91])
    bundle = Bundle.load(place / "artifacts" / "bundle")
    dataset = XMCDataset.open("data/dataset")
    found, about = gating.rank_queries(bundle, dataset, dataset.rows("test"))
    assert about == {"unknown": 10, "removed": 2}
    uids = dataset.label_uids()
    rows = dataset.rows("test")
    for i, text in enumerate(dataset.query_texts(rows)):
        forbidden = {uids[row] for row in dataset.filter_pairs[rows[i]].indices}
        whole = bundle.predict([text], k=60)[0].labels
        slow = [uids.index(uid) for uid in whole if uid in uids and uid not in forbidden][:7]
        assert found[i].tolist() == slow
    assert any(len(dataset.filter_pairs[row].indices) for row in rows)


def test_a_damaged_challenger_does_not_pass_a_damaged_champion_is_an_error(world):
    params = world.params()
    champion = world.bundle("champion")
    world.version(champion, alias="champion")
    damaged = world.bundle("damaged", wrong=[1, 2])
    version = world.version(damaged)
    (damaged / "artifacts" / "bundle" / "labels.arrow").write_bytes(b"x")
    result = pipeline.gate(params)
    assert failed(result) == ["hash"] and "labels.arrow" in result.reasons[-1].words
    assert world.tags(version)["gate.failed"] == "hash"

    other = world.version(world.bundle("other", wrong=[1, 2]), alias=None, bundle__sha256="0" * 64)
    assert failed(pipeline.gate(params, other)) == ["hash"]

    fine = world.version(world.bundle("fine", wrong=[3, 4]), alias=None)
    (champion / "artifacts" / "bundle" / "index.faiss").unlink()
    shutil.rmtree("runs/bundles")
    with pytest.raises(ArtifactError):
        pipeline.gate(params, fine)
    assert "gate.passed" not in world.tags(fine)


def test_hashes_that_agree_do_not_help_what_cannot_be_loaded(world):
    from unidec.data.storage import write_manifest

    place = world.bundle("broken")
    bundle = place / "artifacts" / "bundle"
    (bundle / "index.faiss").write_bytes(b"no index")
    about = json.loads((bundle / "manifest.json").read_text())
    write_manifest(bundle, about["kind"], about["version"], about["meta"])
    world.version(place)
    result = pipeline.gate(world.params())
    assert failed(result) == ["loads"] and "index.faiss" in result.reasons[-1].words


def test_a_refusal_for_uncommitted_changes_ends_with_their_commit(world, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    Path("unidec").mkdir()
    Path("unidec/code.py").write_text("1\n")
    Path("params.yaml").write_text("optim: {epochs: 5}\n")
    for words in (["init", "-q"], ["add", "unidec", "params.yaml"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    world.version(world.bundle("champion", wrong=range(0, 60, 4)), alias="champion")
    Path("unidec/code.py").write_text("2\n")
    tags = {key.replace(".", "__"): value for key, value in code_tags().items()}
    version = world.version(world.bundle("better"), **tags)
    assert failed(pipeline.gate(world.params())) == ["code"] and not pipeline.needs_gate(
        world.params(), version
    )
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    assert pipeline.needs_gate(world.params(), version)
    result = pipeline.gate(world.params())
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert result.passed and result.reasons[0].words == f"commit {head[:12]}"
    assert world.tags(version)["git.dirty"] == "false" and "git.changed" not in world.tags(version)
    assert world.tags(version)["mlflow.source.git.commit"] == head
    assert pipeline.promote(world.params()).dirty is False


def test_a_dirty_tree_and_what_was_rolled_back(world, caplog):
    dirty = world.version(world.bundle("dirty", wrong=range(0, 60, 4)), git__dirty="true")
    result = pipeline.gate(world.params())  # a first champion replaces nothing: a warning is enough
    assert result.passed and "accepted for a first champion" in result.reasons[0].words
    assert "uncommitted changes" in caplog.text
    assert pipeline.promote(world.params()).dirty and world.aliases()["champion"] == dirty
    later = world.version(world.bundle("later", wrong=range(0, 60, 30)), git__dirty="true")
    result = pipeline.gate(world.params())
    assert failed(result) == ["code"] and "--force" in result.reasons[0].words
    assert not pipeline.needs_gate(world.params(), later)
    with pytest.raises(Refused, match=f"unidec models promote {later} --force"):
        pipeline.promote(world.params())
    result = pipeline.gate(world.params(allow_dirty=True))
    assert result.passed and "gate.allow_dirty accepts" in result.reasons[0].words
    assert pipeline.promote(world.params()).dirty and world.aliases()["champion"] == later
    better = world.version(
        world.bundle("better", labels=range(60)),
        rolled_back__at="2026-11-01",
        rolled_back__by="ann",
    )
    assert failed(pipeline.gate(world.params())) == ["rolled back"]
    assert not pipeline.needs_gate(world.params(), better)


def test_a_champion_whose_labels_alone_were_refreshed_need_not_be_better(world):
    champion = world.version(world.bundle("champion"), alias="champion")
    place = world.bundle("refreshed", wrong=[1, 2])
    plain = world.version(place, alias=None)
    refreshed = world.version(place, alias=None, start__kind="refresh", start__version=champion)
    rules = {"tolerance": 8.0, "confidence": 0.9}
    assert "nDCG@5" in failed(pipeline.gate(world.params(**rules), plain))
    assert pipeline.gate(world.params(**rules), refreshed).passed
    assert not pipeline.gate(world.params(tolerance=0.5), refreshed).passed


def test_slower_or_larger(world, played):
    slow = world.bundle("slow", padding=2000)
    champion = world.version(world.bundle("champion"), alias="champion")
    version = world.version(slow)
    sha256 = world.tags(version)["bundle.sha256"]
    played |= {"p95_ms": {sha256: 5.0}, "p95_cpu_ms": {sha256: 5.0}}
    played |= {"load_seconds": {sha256: 61.0}, "load_cpu_seconds": {sha256: 9.0}}
    result = pipeline.gate(
        world.params(max_latency_ms=4.0, max_megabytes=0.1, max_load_seconds=60.0)
    )
    assert failed(result) == [
        "load time",
        "latency",
        "size",
        "load ratio",
        "latency ratio",
        "size ratio",
    ]
    assert "2.50 times the champion's" in world.tags(version)["gate.reasons"]
    off = {"max_load_ratio": 0.0, "max_latency_ratio": 0.0, "max_size_ratio": 0.0}
    assert (
        pipeline.gate(world.params(**off)).passed
        and world.tags(version)["gate.champion"] == champion
    )


def test_a_busy_machine_decides_nothing(world, played):
    world.version(world.bundle("champion"), alias="champion")
    version = world.version(world.bundle("same", labels=[*range(60), 70]))
    sha256 = world.tags(version)["bundle.sha256"]
    # as much work, on cores that others use
    played |= {"load_seconds": {sha256: 300.0}, "p95_ms": {sha256: 90.0}}
    result = pipeline.gate(world.params())
    assert result.passed and {"load ratio", "latency ratio"} <= {
        reason.check for reason in result.reasons
    }


def test_a_clock_that_was_disturbed_once_is_asked_again(world, played, monkeypatch):
    world.version(world.bundle("champion"), alias="champion")
    version = world.version(world.bundle("same", labels=[*range(60), 70]))
    probe = gating.probe_bundle
    calls = []

    def disturbed(path, *args, **options):
        calls.append(path)
        played["p95_cpu_ms"] = {
            world.tags(version)["bundle.sha256"]: 50.0 if len(calls) < 3 else 2.0
        }
        return probe(path, *args, **options)

    monkeypatch.setattr(gating, "probe_bundle", disturbed)
    result = pipeline.gate(world.params())
    assert result.passed and len(calls) == 4


def test_no_test_queries_no_comparison(world):
    world.data(make_raw(num_test=0))
    first = world.version(world.bundle("first"))
    assert pipeline.gate(world.params()).passed  # servable: asked with training queries
    pipeline.promote(world.params(), first)
    world.version(world.bundle("second", wrong=[1, 2]))
    result = pipeline.gate(world.params())
    assert failed(result) == ["nDCG@5"] and "no test queries" in result.reasons[-1].words


def test_no_challenger_says_what_to_do(world):
    world.version(world.bundle("one"), alias=None)
    with pytest.raises(ConfigError, match="unidec models register"):
        pipeline.gate(world.params())


def test_unknown_code_is_not_clean(world):
    """Also for a first champion: whoever does not know what was trained has to allow it."""
    reason = (
        "git rev-parse: fatal: detected dubious ownership, git config --global --add "
        "safe.directory /p"
    )
    version = world.version(world.bundle("silent"), git__unknown=reason, git__dirty="")
    world.client.delete_model_version_tag(world.name, version, "git.dirty")
    verdict = pipeline.gate(world.params())
    assert failed(verdict) == ["code"] and reason in verdict.reasons[0].words
    with pytest.raises(Refused, match="did not pass the gate: code"):
        pipeline.promote(world.params())
    assert not pipeline.gate(world.params()).passed
    assert pipeline.gate(world.params(allow_dirty=True)).passed
    assert pipeline.promote(world.params(allow_dirty=True)).dirty is True
