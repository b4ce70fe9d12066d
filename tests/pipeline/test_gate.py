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
def registry(store, tmp_path, monkeypatch, request):
    registry = GatedRegistry(tmp_path, store, re.sub(r"\W", "-", request.node.name).strip("-"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.uri)
    registry.data()
    return registry


@pytest.fixture(autouse=True)
def probe_times(monkeypatch):
    """Figures of fresh processes without a process: `probe_times["p95_ms"] = 3.0`, or {sha256:
    3.0}.
    """
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


def test_from_the_first_model_to_one_that_takes_its_place(registry):
    params = registry.params()
    first = registry.version(registry.bundle("first", wrong=range(0, 60, 4)))
    assert pipeline.needs_gate(params, first)
    result = pipeline.gate(params)
    assert result.passed and result.challenger == first and result.champion is None
    assert [r.check for r in result.reasons] == ["code", "hash", "loads"]
    assert result.metrics == {}  # no champion to compare with
    pipeline.promote(params, first)
    assert registry.aliases() == {"champion": first, "challenger": first}
    assert not pipeline.needs_gate(params, first)
    again = pipeline.gate(params)
    assert again.already and again.passed and failed(again) == []

    better = registry.version(registry.bundle("better", wrong=range(0, 60, 30)))
    result = pipeline.gate(params)
    assert result.passed, result.reasons
    assert result.champion == first
    expected = 100 * 58 / 60
    assert result.metrics["challenger"]["P@1"] == pytest.approx(expected)
    assert result.metrics["champion"]["P@1"] == pytest.approx(75)
    assert pipeline.promote(params).previous == first
    assert registry.aliases() == {"champion": better, "previous": first, "challenger": better}


def test_a_worse_one_is_refused_and_every_reason_is_kept(registry):
    params = registry.params()
    champion = registry.version(registry.bundle("champion"), alias="champion")
    worse = registry.version(registry.bundle("worse", wrong=range(0, 60, 5)))
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
    tags = registry.tags(worse)
    assert tags["gate.passed"] == "false" and tags["gate.champion"] == champion
    assert tags["gate.failed"] == ", ".join(failed(result))
    assert len(tags["gate.reasons"].splitlines()) == len(result.reasons)
    assert "FAIL nDCG@5: " in tags["gate.reasons"] and "pass loads: " in tags["gate.reasons"]
    assert json.loads(tags["gate.metrics"])["P@1"] == pytest.approx(80)
    kept = json.loads(Path("outputs/gate.json").read_text())
    assert kept["reasons"] == [asdict(one) for one in result.reasons]
    assert kept["comparison"]["worse"] == 48
    assert kept["comparison"]["better"] == 0
    page = Path(result.page).read_text()
    assert (
        f"version {worse} refused" in page
        and "FAIL" in page
        and "report.html" in page
        and "<script" not in page
    )
    with pytest.raises(Refused, match="did not pass the gate"):
        pipeline.promote(params)
    assert registry.aliases()["champion"] == champion
    # as things are it stays refused; other settings, other data or another champion are another
    # question
    assert not pipeline.needs_gate(params, worse)
    assert pipeline.needs_gate(registry.params(margin=-30.0), worse)


def split_changed(registry, num_seen: int, num_test: int = 60) -> tuple[list[str], list[str]]:
    """New data whose test queries are named as the champion's training queries were: of the first
    `num_seen`, the texts are the same. Returns the texts that the champion and that the challenger
    were trained on.
    """
    raw = make_raw(num_test=num_test)
    test = raw.queries["test"]
    titles = [f"{title} v{row}" for row, title in enumerate(test["title"].to_pylist())]
    test = test.set_column(1, "title", pa.array(titles, pa.large_string()))
    registry.data(replace(raw, queries={**raw.queries, "test": test}))
    return titles[:num_seen], raw.queries["train"]["title"].to_pylist()


def test_a_split_that_changed_is_judged_on_queries_that_neither_has_seen(registry):
    before, now = split_changed(registry, 40, 160)
    # right about what it was trained on, wrong about many others
    champion = registry.bundle("champion", wrong=range(40, 60, 2), trained_on=before)
    registry.version(champion, alias="champion")
    challenger = registry.version(registry.bundle("challenger", wrong=[40], trained_on=now))
    result = pipeline.gate(registry.params(confidence=0.0))
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
    assert pipeline.promote(registry.params(), challenger).version == challenger


@pytest.mark.parametrize("who", ["champion", "challenger"])
def test_too_few_unseen_queries_are_no_verdict_unless_that_is_accepted(registry, who):
    seen, other = split_changed(registry, 45)
    trained_on = {"champion": other, "challenger": other} | {who: seen}
    registry.version(
        registry.bundle("champion", wrong=[1], trained_on=trained_on["champion"]), alias="champion"
    )
    registry.version(registry.bundle("challenger", trained_on=trained_on["challenger"]))
    result = pipeline.gate(registry.params())
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
    accepted = registry.params(confidence=0.0).model_copy(
        update={"validation": Validation(test_texts_in_train="warn")}
    )
    assert pipeline.needs_gate(accepted, "challenger")
    result = pipeline.gate(accepted)
    assert result.metrics
    assert "all are judged on, which validation.test_texts_in_train: warn accepts" in next(
        reason.words for reason in result.reasons if reason.check == "unseen queries"
    )


def test_what_a_bundle_without_record_was_trained_on_is_said_to_be_unknown(registry):
    _, now = split_changed(registry, 0)
    registry.version(registry.bundle("champion", wrong=[1]), alias="champion")
    registry.version(registry.bundle("challenger", trained_on=now))
    result = pipeline.gate(registry.params(confidence=0.0))
    [check] = [reason for reason in result.reasons if reason.check == "unseen queries"]
    assert check.passed and "which queries the champion was trained on is unknown" in check.words
    page = Path(result.page).read_text()
    assert "Which queries the champion was trained on is unknown." in page


def test_copies_of_old_bundles_make_room(registry, monkeypatch):
    monkeypatch.setattr(gating, "_KEPT_COPIES", 2)
    registry.version(registry.bundle("champion", wrong=[1, 2]), alias="champion")
    pipeline.gate(registry.params(), registry.version(registry.bundle("a", wrong=[3, 4])))
    for i, name in enumerate(("old", "older", "oldest")):
        (Path("runs/bundles") / name).mkdir()
        os.utime(Path("runs/bundles") / name, (1000 - i, 1000 - i))
    version = registry.version(registry.bundle("b"))
    pipeline.gate(registry.params(), version)
    left = {path.name for path in Path("runs/bundles").iterdir() if path.is_dir()}
    compared = {
        registry.tags(number)["bundle.sha256"][:16]
        for number in (registry.aliases()["champion"], version)
    }
    assert compared <= left
    assert not {"old", "older", "oldest"} & left
    assert len(left) == 3


def test_labels_meet_by_uid_a_new_one_is_a_miss_a_removed_one_leaves_the_answer(registry):
    # labels 6 to 65: 0 to 5 are gone, 60 to 65 are new
    raw = make_raw(first=6)
    registry.data(raw)
    registry.version(registry.bundle("old", labels=range(60)), alias="champion")
    registry.version(registry.bundle("new", labels=reversed(range(6, 66))))  # in another order
    result = pipeline.gate(registry.params())
    assert result.passed
    assert result.metrics["challenger"]["P@1"] == 100.0
    assert result.metrics["champion"]["P@1"] == pytest.approx(90.0)  # right about 54 of 60 labels
    kept = json.loads(Path("outputs/gate.json").read_text())
    assert kept["labels"] == {
        "challenger": {"unknown": 0, "removed": 0},
        "champion": {"unknown": 6, "removed": 6},
    }
    assert "does not know 6 labels" in Path(result.page).read_text()


def test_rankings_beside_a_slow_reference_filter_pairs_left_out(registry, monkeypatch):
    monkeypatch.setattr(gating, "K", 7)
    place = registry.bundle("one", wrong=range(3), labels=[*range(50), 90, 91])
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


def test_a_damaged_challenger_does_not_pass_a_damaged_champion_is_an_error(registry):
    params = registry.params()
    champion = registry.bundle("champion")
    registry.version(champion, alias="champion")
    damaged = registry.bundle("damaged", wrong=[1, 2])
    version = registry.version(damaged)
    (damaged / "artifacts" / "bundle" / "labels.arrow").write_bytes(b"x")
    result = pipeline.gate(params)
    assert failed(result) == ["hash"]
    assert "labels.arrow" in result.reasons[-1].words
    assert registry.tags(version)["gate.failed"] == "hash"

    other = registry.version(
        registry.bundle("other", wrong=[1, 2]), alias=None, bundle__sha256="0" * 64
    )
    assert failed(pipeline.gate(params, other)) == ["hash"]

    fine = registry.version(registry.bundle("fine", wrong=[3, 4]), alias=None)
    (champion / "artifacts" / "bundle" / "index.faiss").unlink()
    shutil.rmtree("runs/bundles")
    with pytest.raises(ArtifactError):
        pipeline.gate(params, fine)
    assert "gate.passed" not in registry.tags(fine)


def test_hashes_that_agree_do_not_help_what_cannot_be_loaded(registry):
    from unidec.data.storage import write_manifest

    place = registry.bundle("broken")
    bundle = place / "artifacts" / "bundle"
    (bundle / "index.faiss").write_bytes(b"no index")
    about = json.loads((bundle / "manifest.json").read_text())
    write_manifest(bundle, about["kind"], about["version"], about["meta"])
    registry.version(place)
    result = pipeline.gate(registry.params())
    assert failed(result) == ["loads"]
    assert "index.faiss" in result.reasons[-1].words


def test_a_refusal_for_uncommitted_changes_ends_with_their_commit(registry, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    Path("unidec").mkdir()
    Path("unidec/code.py").write_text("1\n")
    Path("params.yaml").write_text("optim: {epochs: 5}\n")
    for words in (
        ["init", "-q"],
        ["add", "unidec", "params.yaml"],
        ["commit", "-qm", "one"],
    ):
        subprocess.run([*git, *words], check=True)
    registry.version(registry.bundle("champion", wrong=range(0, 60, 4)), alias="champion")
    Path("unidec/code.py").write_text("2\n")
    tags = {key.replace(".", "__"): value for key, value in code_tags().items()}
    version = registry.version(registry.bundle("better"), **tags)
    assert failed(pipeline.gate(registry.params())) == ["code"]
    assert not pipeline.needs_gate(registry.params(), version)
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    assert pipeline.needs_gate(registry.params(), version)
    result = pipeline.gate(registry.params())
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert result.passed
    expected = f"commit {head[:12]}"
    assert result.reasons[0].words == expected
    assert registry.tags(version)["git.dirty"] == "false"
    assert "git.changed" not in registry.tags(version)
    assert registry.tags(version)["mlflow.source.git.commit"] == head
    assert pipeline.promote(registry.params()).dirty is False


def test_a_dirty_tree_and_what_was_rolled_back(registry, caplog):
    dirty = registry.version(registry.bundle("dirty", wrong=range(0, 60, 4)), git__dirty="true")
    result = pipeline.gate(
        registry.params()
    )  # a first champion replaces nothing: a warning is enough
    assert result.passed and "accepted for a first champion" in result.reasons[0].words
    assert "uncommitted changes" in caplog.text
    assert pipeline.promote(registry.params()).dirty
    assert registry.aliases()["champion"] == dirty
    later = registry.version(registry.bundle("later", wrong=range(0, 60, 30)), git__dirty="true")
    result = pipeline.gate(registry.params())
    assert failed(result) == ["code"]
    assert "--force" in result.reasons[0].words
    assert not pipeline.needs_gate(registry.params(), later)
    with pytest.raises(Refused, match=f"unidec models promote {later} --force"):
        pipeline.promote(registry.params())
    result = pipeline.gate(registry.params(allow_dirty=True))
    assert result.passed and "gate.allow_dirty accepts" in result.reasons[0].words
    assert pipeline.promote(registry.params()).dirty
    assert registry.aliases()["champion"] == later
    better = registry.version(
        registry.bundle("better", labels=range(60)),
        rolled_back__at="2026-11-01",
        rolled_back__by="ann",
    )
    assert failed(pipeline.gate(registry.params())) == ["rolled back"]
    assert not pipeline.needs_gate(registry.params(), better)


def test_a_champion_whose_labels_alone_were_refreshed_need_not_be_better(registry):
    champion = registry.version(registry.bundle("champion"), alias="champion")
    place = registry.bundle("refreshed", wrong=[1, 2])
    plain = registry.version(place, alias=None)
    refreshed = registry.version(place, alias=None, start__kind="refresh", start__version=champion)
    rules = {"tolerance": 8.0, "confidence": 0.9}
    assert "nDCG@5" in failed(pipeline.gate(registry.params(**rules), plain))
    assert pipeline.gate(registry.params(**rules), refreshed).passed
    assert not pipeline.gate(registry.params(tolerance=0.5), refreshed).passed


def test_slower_or_larger(registry, probe_times):
    slow = registry.bundle("slow", padding=2000)
    champion = registry.version(registry.bundle("champion"), alias="champion")
    version = registry.version(slow)
    sha256 = registry.tags(version)["bundle.sha256"]
    probe_times |= {"p95_ms": {sha256: 5.0}, "p95_cpu_ms": {sha256: 5.0}}
    probe_times |= {"load_seconds": {sha256: 61.0}, "load_cpu_seconds": {sha256: 9.0}}
    result = pipeline.gate(
        registry.params(max_load="2x, 60 s", max_latency="2x, 4 ms", max_size="1.5x, 0.1 MB")
    )
    assert failed(result) == [
        "load time",
        "latency",
        "size",
        "load ratio",
        "latency ratio",
        "size ratio",
    ]
    assert "2.50 times the champion's" in registry.tags(version)["gate.reasons"]
    off = {"max_load": "off", "max_latency": "off", "max_size": "off"}
    assert (
        pipeline.gate(registry.params(**off)).passed
        and registry.tags(version)["gate.champion"] == champion
    )


def test_a_busy_machine_decides_nothing(registry, probe_times):
    registry.version(registry.bundle("champion"), alias="champion")
    version = registry.version(registry.bundle("same", labels=[*range(60), 70]))
    sha256 = registry.tags(version)["bundle.sha256"]
    # as much work, on cores that others use
    probe_times |= {"load_seconds": {sha256: 300.0}, "p95_ms": {sha256: 90.0}}
    result = pipeline.gate(registry.params())
    assert result.passed and {"load ratio", "latency ratio"} <= {
        reason.check for reason in result.reasons
    }


def test_a_clock_that_was_disturbed_once_is_asked_again(registry, probe_times, monkeypatch):
    registry.version(registry.bundle("champion"), alias="champion")
    version = registry.version(registry.bundle("same", labels=[*range(60), 70]))
    probe = gating.probe_bundle
    calls = []

    def disturbed(path, *args, **options):
        calls.append(path)
        probe_times["p95_cpu_ms"] = {
            registry.tags(version)["bundle.sha256"]: 50.0 if len(calls) < 3 else 2.0
        }
        return probe(path, *args, **options)

    monkeypatch.setattr(gating, "probe_bundle", disturbed)
    result = pipeline.gate(registry.params())
    assert result.passed and len(calls) == 4


def test_no_test_queries_no_comparison(registry):
    registry.data(make_raw(num_test=0))
    first = registry.version(registry.bundle("first"))
    assert pipeline.gate(registry.params()).passed  # servable: asked with training queries
    pipeline.promote(registry.params(), first)
    registry.version(registry.bundle("second", wrong=[1, 2]))
    result = pipeline.gate(registry.params())
    assert failed(result) == ["nDCG@5"]
    assert "no test queries" in result.reasons[-1].words


def test_no_challenger_says_what_to_do(registry):
    registry.version(registry.bundle("one"), alias=None)
    with pytest.raises(ConfigError, match="unidec models register"):
        pipeline.gate(registry.params())


def test_unknown_code_is_not_clean(registry):
    """Also for a first champion: whoever does not know what was trained has to allow it."""
    reason = (
        "git rev-parse: fatal: detected dubious ownership, git config --global --add "
        "safe.directory /p"
    )
    version = registry.version(registry.bundle("silent"), git__unknown=reason, git__dirty="")
    registry.client.delete_model_version_tag(registry.name, version, "git.dirty")
    verdict = pipeline.gate(registry.params())
    assert failed(verdict) == ["code"]
    assert reason in verdict.reasons[0].words
    with pytest.raises(Refused, match="did not pass the gate: code"):
        pipeline.promote(registry.params())
    assert not pipeline.gate(registry.params()).passed
    assert pipeline.gate(registry.params(allow_dirty=True)).passed
    assert pipeline.promote(registry.params(allow_dirty=True)).dirty is True
