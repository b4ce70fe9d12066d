"""Votes of training queries: against loops over all of them, over all labels; the bundle that
carries them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers.dense_votes import dense_votes
from helpers.slow_scores import head_scores
from helpers.tiny_bundle import TITLES, UIDS, predict_file, write_tiny_bundle
from scipy.sparse import csr_matrix

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import KIND, VERSION, BundleLabels, Scoring, write_bundle
from unidec.bundle.bundle_info import KnnInfo
from unidec.bundle.neighbour_files import FILES
from unidec.data.storage import folder_sha256, read_manifest, write_manifest
from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError
from unidec.ranking.heads import Candidates, PairScores, candidate_keys, votes_alone
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import TEMPERATURE, Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.ranker import Voting

QUERIES = [
    "red car",
    "an old house",
    "",
    "boat boat blue",
    "🚗 unknown \x00 words",
    "big green boat",
]


def slow_votes(
    query_D, vectors_MD, labels: list[set[int]], num_labels: int, num: int
) -> list[float]:
    """Votes of one query, in double precision, one training query after the other; largest 1."""
    query = np.asarray(query_D, dtype=float)
    length = float(np.sqrt((query**2).sum()))
    cosines = [
        float(query @ np.asarray(row, dtype=float)) / length if length else 0.0
        for row in vectors_MD
    ]
    nearest = sorted(range(len(cosines)), key=lambda m: (-cosines[m], m))[:num]
    votes = [0.0] * num_labels
    for m in nearest:
        weight = 0.0
        if cosines[m] > 0:
            weight = float(np.exp((cosines[m] - cosines[nearest[0]]) / TEMPERATURE))
        for label in labels[m]:
            votes[label] += weight
    most = max(votes)
    return [value / most for value in votes] if most else votes


def random_neighbours(
    rng: np.random.Generator, num: int, num_labels: int, dim: int, share: float = 0.2
):
    labels_ML = rng.random((num, num_labels)) < share
    names = [f"q{m}" for m in range(num)]
    made = Neighbours(
        rng.normal(size=(num, dim)).astype(np.float32) * 3,
        csr_matrix(labels_ML),
        names,
        names,
    )
    return made, [set(np.flatnonzero(row).tolist()) for row in labels_ML]


# by words alone: test_words.py
@pytest.mark.parametrize(
    ("num_train", "num_labels", "share", "num"),
    [
        (40, 13, 0.2, 5),
        (40, 13, 0.2, 40),
        (7, 3, 0.5, 100),
        (1, 1, 1.0, 1),
        (25, 50, 0.02, 10),
        (9, 4, 0.0, 3),
    ],
)
def test_votes_are_those_of_a_loop(rng, num_train, num_labels, share, num):
    neighbours, labels = random_neighbours(rng, num_train, num_labels, 4, share)
    query_BD = rng.normal(size=(11, 4)).astype(np.float32)
    query_BD[3] = 0  # no direction at all
    query_BD[4] = -neighbours.vectors_MD.astype(np.float32).mean(axis=0)  # away from most of them
    votes = neighbours.votes(query_BD, num)
    assert votes.shape == (11, num_labels)
    assert votes.score_N.dtype == np.float32
    assert (votes.score_N > 0).all()
    assert (np.diff(votes.key_N) > 0).all()
    for i, row in enumerate(dense_votes(votes)):
        expected = slow_votes(query_BD[i], neighbours.vectors_MD, labels, num_labels, num)
        np.testing.assert_allclose(row, expected, rtol=2e-3, atol=1e-5)
        assert row.max() == (1 if any(expected) else 0)
    cosine, rows = neighbours.nearest(query_BD, num)
    assert cosine.shape == rows.shape == (11, min(num, num_train))
    assert rows.min() >= 0
    assert (np.diff(cosine, axis=1) <= 0).all()


def test_no_queries_and_only_opposite_neighbours():
    neighbours = Neighbours(
        np.eye(3, dtype=np.float32), csr_matrix(np.eye(3)), list("abc"), list("abc")
    )
    assert neighbours.votes(np.zeros((0, 3), dtype=np.float32), 2).shape == (0, 3)
    assert neighbours.votes(-np.ones((2, 3), dtype=np.float32), 2).score_N.size == 0
    opposite = Encoded(-np.ones((2, 3), dtype=np.float32), None)
    assert (Voting(neighbours=neighbours, num=2).rank(opposite, 4).rows == -1).all()
    many = dense_votes(neighbours.votes(np.array([[3, 2, 1]], dtype=np.float32), 2))
    cosines = np.array([3, 2]) / np.sqrt(14)
    expected = [[1, np.exp((cosines[1] - cosines[0]) / TEMPERATURE), 0]]
    np.testing.assert_allclose(many, expected, rtol=1e-5)


def test_a_label_of_a_neighbour_is_one_vote_however_relevant(rng):
    graded = csr_matrix(np.array([[5.0, 0.1, 0.0], [0.0, 2.0, 0.0]]))
    stored_zero = csr_matrix(([5.0, 0.1, 0.0, 2.0], ([0, 0, 0, 1], [0, 1, 2, 1])), shape=(2, 3))
    doubled = csr_matrix(([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], [0, 3, 4]), shape=(2, 3))
    for labels in (graded, stored_zero, doubled):
        neighbours = Neighbours(np.ones((2, 2), dtype=np.float32), labels, "ab", "ab")
        votes = dense_votes(neighbours.votes(np.ones((1, 2), dtype=np.float32), 2))
        np.testing.assert_allclose(votes, [[0.5, 1, 0]])


def test_parts_that_do_not_fit_are_refused():
    vectors = np.ones((2, 3), dtype=np.float32)
    labels = csr_matrix(np.eye(2))
    for wrong in (
        lambda: Neighbours(vectors[:1], labels, "ab", "ab"),
        lambda: Neighbours(vectors, labels, "a", "ab"),
        lambda: Neighbours(vectors, labels, "ab", "abc"),
        lambda: Neighbours(vectors[:0], labels[:0], "", ""),
        lambda: Neighbours(vectors * np.nan, labels, "ab", "ab"),
    ):
        with pytest.raises(ValueError, match=r"same queries|finite"):
            wrong()


@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3, 5.0])
def test_candidates_are_enough_for_the_best_of_all_labels(rng, weight, excluding):
    """The heads' k best and the voted labels alone give the ranking of all labels, ties
    by label.
    """
    num_queries = 17
    num_labels = 23
    for k in (1, 4, 23, 30):
        # with ties
        heads_BL = np.round(rng.normal(size=(num_queries, num_labels)), 1).astype(np.float32)
        votes_BL = np.where(
            rng.random(heads_BL.shape) < 0.15, np.round(rng.random(heads_BL.shape), 1), 0
        ).astype("f4")
        votes_BL[0] = 0
        out_BL = (rng.random(heads_BL.shape) < 0.3) & excluding
        out_BL[1] = excluding  # nothing is left
        keys = np.flatnonzero(out_BL.ravel())
        masked = np.where(out_BL, -np.inf, heads_BL)
        found_BK = np.argsort(-masked, axis=1, kind="stable")[:, :k]
        found_BK = np.where(np.take_along_axis(masked, found_BK, axis=1) > -np.inf, found_BK, -1)
        votes = PairScores.of(csr_matrix(votes_BL))
        candidates = candidate_keys(found_BK, votes.key_N, num_labels, keys)
        pairs = Candidates.of(candidates, votes)
        total_P = heads_BL.ravel()[candidates] + np.float32(weight) * pairs.votes_P
        ranked = pairs.best(total_P, k)
        assert (
            ranked.rows.shape == ranked.scores.shape == ranked.knn_scores.shape == (num_queries, k)
        )
        for b in range(num_queries):
            total = {
                j: heads_BL[b, j] + np.float32(weight) * votes_BL[b, j]
                for j in np.flatnonzero(~out_BL[b])
            }
            best = sorted(total, key=lambda j: (-total[j], j))[:k]
            scores = ranked.scores[b, : len(best)]
            np.testing.assert_array_equal(scores, [total[j] for j in best])
            # of several that are equal at the end of the heads' list, which one is there is the
            # search's choice
            sure = scores > (scores[-1] if len(best) else 0)
            assert (
                ranked.rows[b, : len(best)][sure].tolist()
                == np.array(best, dtype=int)[sure].tolist()
            )
            assert (ranked.rows[b, len(best) :] == -1).all()
            assert (ranked.scores[b, len(best) :] == -np.inf).all()
            at = ranked.rows[b, : len(best)]
            np.testing.assert_array_equal(ranked.knn_scores[b, : len(best)], votes_BL[b, at])
            assert np.isnan(ranked.knn_scores[b, len(best) :]).all()


def test_votes_alone_are_sorted_votes(rng):
    has_vote_BL = rng.random((9, 14)) < 0.4
    vote_BL = np.round(rng.random((9, 14)), 1)
    votes_BL = np.where(has_vote_BL, vote_BL, 0).astype(np.float32)
    keys = np.flatnonzero(rng.random(votes_BL.size) < 0.2)
    left = votes_BL.copy()
    left.ravel()[keys] = 0
    ranked = votes_alone(PairScores.of(csr_matrix(votes_BL)), 5, keys)
    for b, row in enumerate(left):
        in_order = sorted(range(14), key=lambda j: (-row[j], j))
        best = [j for j in in_order if row[j] > 0][:5]
        assert ranked.rows[b].tolist() == best + [-1] * (5 - len(best))


def _slow_predict(parts: dict, i: int, k: int, exclude: list[str], space: str, normalize: bool):
    """All labels of one query, scored one by one: (score, label row, votes), best first."""
    model = parts["model"]
    de, clf = model.encode_queries(
        encode_texts(QUERIES, model.tokenizer_folder, 8), np.arange(len(QUERIES))
    )
    own = parts["neighbours"]
    labels = [set(own.labels_ML[m].indices.tolist()) for m in range(own.num_queries)]
    de_D = None if de is None else de[i]
    clf_D = None if clf is None else clf[i]
    searched = clf_D if de_D is None else de_D
    votes = slow_votes(searched, own.vectors_MD, labels, len(UIDS), 7)
    out = []
    for j, uid in enumerate(UIDS):
        if uid in exclude:
            continue
        s_de, s_clf = head_scores(parts, de_D, clf_D, j, normalize)
        total = {"both": s_de + 0.5 * s_clf, "de": s_de, "clf": s_clf}[space] + 0.7 * votes[j]
        out.append((total, j, votes[j]))
    return sorted(out, key=lambda row: (-row[0], row[1]))[:k]


BY_MODEL = {
    f"neighbours/{name}" for name in ("vectors.npy", "indptr.npy", "labels.npy", "queries.arrow")
}
SYSTEMS = [
    ("both", "both", True, False),
    ("both", "both", False, True),
    ("both", "clf", False, False),
    ("de", "de", True, False),
    ("clf", "clf", True, False),
]


@pytest.mark.usefixtures("stub_model")
@pytest.mark.parametrize(("heads", "space", "normalize", "bias"), SYSTEMS)
def test_a_bundle_predicts_as_a_loop_over_labels_and_training_queries(
    rng, tmp_path, heads, space, normalize, bias
):
    parts = write_tiny_bundle(
        tmp_path / "b",
        rng,
        heads=heads,
        space=space,
        clf_normalize=normalize,
        bias=bias,
        votes=True,
    )
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.info.knn is not None and bundle.info.knn.space == (
        "clf" if heads == "clf" else "de"
    )
    exclude = [["L0", "L3"], [], ["nobody"], UIDS[:11], ["L5", "L5"], UIDS]
    for k in (1, 4, 12, 40):
        found = bundle.predict(QUERIES, k=k, exclude=exclude, batch_size=4)
        for i, got in enumerate(found):
            expected = _slow_predict(parts, i, k, exclude[i], space, normalize)
            assert len(got.labels) == len(got.titles) == len(got.knn_scores) == len(expected)
            np.testing.assert_allclose(
                got.scores, [row[0] for row in expected], rtol=2e-3, atol=1e-4
            )
            at = {UIDS[row[1]]: row for row in expected}
            for uid, title, votes in zip(got.labels, got.titles, got.knn_scores, strict=True):
                if uid in at:
                    assert title == TITLES[at[uid][1]]
                    assert votes == pytest.approx(at[uid][2], rel=2e-3, abs=1e-4)
            if space == "both":
                blend = (
                    np.array(got.de_scores)
                    + 0.5 * np.array(got.clf_scores)
                    + 0.7 * np.array(got.knn_scores)
                )
                np.testing.assert_allclose(got.scores, blend, rtol=1e-4, atol=1e-4)
    assert bundle.predict_arrays([], k=3).knn_scores.shape == (0, 3)


@pytest.mark.usefixtures("stub_model")
def test_votes_can_lift_a_label_far_below_the_heads_best(rng, tmp_path):
    """The candidates hold voted labels that no search for k labels would bring."""
    write_tiny_bundle(tmp_path / "with", rng, votes=True, knn_weight=100.0)
    bundle = Bundle.load(tmp_path / "with")
    tokens = encode_texts(QUERIES, bundle.model.tokenizer_folder, 8)
    de, clf = bundle.model.encode_queries(tokens, np.arange(len(QUERIES)))
    found = bundle.ranker.rank(Encoded(de, clf), 1)
    _, by_heads = bundle.index.search(np.concatenate([de, np.float32(0.5) * clf], axis=1), 1)
    votes = bundle.neighbours.votes(de, 7)
    assert (found.knn_scores[dense_votes(votes).any(axis=1)] == 1).all()
    assert (found.rows != by_heads).any()


@pytest.mark.usefixtures("stub_model")
def test_the_batch_and_what_is_excluded_do_not_change_a_score(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng, votes=True)
    bundle = Bundle.load(tmp_path / "b")
    whole, pieces = (bundle.predict_arrays(QUERIES * 9, k=12, batch_size=size) for size in (100, 5))
    np.testing.assert_allclose(whole.scores, pieces.scores, rtol=1e-5, atol=1e-6)
    free = bundle.predict(["red car"], k=12)[0]
    less = bundle.predict(["red car"], k=12, exclude=[free.labels[:2]])[0]
    assert less.labels == free.labels[2:]
    assert less.knn_scores == free.knn_scores[2:]
    expected = free.scores[2:]
    np.testing.assert_allclose(less.scores, expected, rtol=1e-6)
    (tmp_path / "in.csv").write_text("query\nred car\nan old house\n")
    predict_file(bundle, tmp_path / "in.csv", tmp_path / "out.jsonl", k=2)
    lines = [
        json.loads(line)
        for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["label"] for line in lines] == [
        x for text in QUERIES[:2] for x in bundle.predict([text], 2)[0].labels
    ]


@pytest.mark.usefixtures("stub_model")
def test_what_is_written_is_read_and_two_writings_are_the_same(tmp_path):
    for name in ("one", "two"):
        parts = write_tiny_bundle(tmp_path / name / "b", np.random.default_rng(5), votes=True)
    assert folder_sha256(tmp_path / "one" / "b") == folder_sha256(tmp_path / "two" / "b")
    assert set(read_manifest(tmp_path / "one" / "b", KIND, VERSION)["files"]) & FILES == BY_MODEL
    bundle = Bundle.load(tmp_path / "one" / "b")
    own = parts["neighbours"]
    assert bundle.info.knn.model_dump() == {
        "weight": 0.7,
        "neighbours": 7,
        "vote": "softmax",
        "space": "de",
        "num_queries": 30,
        "num_pairs": own.labels_ML.nnz,
        "num_words": None,
        "word_head": 0,
    }
    read = bundle.neighbours
    np.testing.assert_array_equal(read.vectors_MD, own.vectors_MD)
    assert read.vectors_MD.dtype == np.float16
    assert (read.labels_ML != own.labels_ML).nnz == 0
    assert read.uids.to_pylist() == [f"Q{m}" for m in range(30)]
    assert read.titles.to_pylist() == own.titles.to_pylist()
    write_tiny_bundle(tmp_path / "none" / "b", np.random.default_rng(5))
    without = Bundle.load(tmp_path / "none" / "b")
    assert without.neighbours is None and without.info.knn is None
    assert (
        without.predict(["red"])[0].knn_scores == []
        and without.predict_arrays(["red"]).knn_scores is None
    )
    assert not FILES & set(read_manifest(without.path, KIND, VERSION)["files"])


def test_neighbours_that_do_not_fit_the_bundle_are_not_written(rng, tmp_path):
    neighbours, _ = random_neighbours(rng, 5, 12, 6)
    knn = KnnInfo.of(neighbours, 0.5)
    for num, dim, info, voters, message in (
        (11, 6, knn, neighbours, "number of labels"),
        (12, 7, knn, neighbours, "width 6"),
        (12, 6, knn, None, "need both"),
        (12, 6, None, neighbours, "need both"),
    ):
        de = rng.normal(size=(num, dim)).astype(np.float32)
        labels = BundleLabels(map(str, range(num)), map(str, range(num)), {"de": de})
        scoring = Scoring("de", 1.0, True, info)
        index = LabelIndex.build(de)
        with pytest.raises(ValueError, match=message):
            write_bundle(tmp_path / "b", tmp_path, index, labels, scoring, neighbours=voters)
    for weight in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="weight"):
            KnnInfo.of(neighbours, weight)


@pytest.fixture
def voting(tmp_path, stub_model) -> Path:
    write_tiny_bundle(tmp_path / "b", np.random.default_rng(2), votes=True)
    return Path(tmp_path / "b")


def _refused(folder: Path, name: str) -> None:
    """The manifest is made to fit, as an attacker's would."""
    about = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, about["kind"], about["version"], about["meta"])
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        Bundle.load(folder, verify=False)


@pytest.mark.parametrize("name", sorted(FILES))
def test_damage_is_found(voting, name, tmp_path):
    if name not in BY_MODEL:
        write_tiny_bundle(
            tmp_path / "b", np.random.default_rng(2), votes=True, by_words=True, fused=True
        )
    whole = (voting / name).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data in (bytes(flipped), whole[:-5], whole + b"x", b""):
        (voting / name).write_bytes(data)
        with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
            Bundle.load(voting)
    (voting / name).unlink()
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        Bundle.load(voting)
    _refused(voting, name)


def test_arrays_that_lead_outside_are_refused(voting):
    place = voting / "neighbours"
    vectors, indptr, labels = (
        np.load(place / f"{name}.npy") for name in ("vectors", "indptr", "labels")
    )
    high = labels.copy()
    low = labels.copy()
    late = indptr.copy()
    back = indptr.copy()
    high[0] = 12
    low[-1] = -1
    late[-1] = len(labels) + 5
    back[3] = indptr[-1] + 1
    start = indptr.copy()
    start[0] = 1
    inf = vectors.copy()
    inf[2, 1] = np.inf
    for name, wrong in (
        ("labels", [high, low, labels[:-1], labels.astype(np.int64), labels[None]]),
        ("indptr", [late, back, start, indptr[:-1], indptr.astype(np.int32)]),
        ("vectors", [vectors[:-1], vectors[:, :3], vectors.astype(np.float32), inf]),
    ):
        good = (place / f"{name}.npy").read_bytes()
        for array in wrong:
            np.save(place / f"{name}.npy", array)
            _refused(voting, f"{name}.npy")
        (place / f"{name}.npy").write_bytes(good)
    Bundle.load(voting, verify=False)


def test_titles_of_another_kind_are_refused(voting):
    where = voting / "neighbours" / "queries.arrow"
    good = pa.ipc.open_file(where).read_all()
    nulls = pa.table({"uid": pa.array([None] * 30, pa.large_string()), "title": good["title"]})
    for table in (good.slice(0, 29), good.select(["uid"]), good.rename_columns(["a", "b"]), nulls):
        with pa.OSFile(str(where), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        _refused(voting, "queries.arrow")
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(where), "wb") as file,
        pa.ipc.new_file(file, good.schema, options=options) as writer,
    ):
        writer.write_table(good)
    _refused(voting, "queries.arrow")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": "1"},
        {"neighbours": 0},
        {"vote": "loud"},
        {"space": "both"},
        {"num_queries": 29},
        {"num_queries": 10**12},
        {"num_pairs": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_bundle_json_that_contradicts_the_votes(voting, changes):
    info = json.loads((voting / "bundle.json").read_text())
    info["knn"] |= changes
    (voting / "bundle.json").write_text(json.dumps(info))
    _refused(voting, "bundle.json|neighbours/")


def test_votes_of_a_head_that_is_not_there(tmp_path, stub_model):
    write_tiny_bundle(
        tmp_path / "b", np.random.default_rng(2), heads="clf", space="clf", votes=True
    )
    info = json.loads((tmp_path / "b" / "bundle.json").read_text())
    info["knn"]["space"] = "de"
    (tmp_path / "b" / "bundle.json").write_text(json.dumps(info))
    _refused(tmp_path / "b", "bundle.json")
    shutil.rmtree(tmp_path / "b" / "neighbours")
    info["knn"]["space"] = "clf"
    (tmp_path / "b" / "bundle.json").write_text(json.dumps(info))
    _refused(tmp_path / "b", "No such file")
