"""Prediction and encoding in shards against the same in one piece: byte for byte, also after a
SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.tiny_bundle import predict_file, write_tiny_bundle

from unidec.bundle import predict_file as module
from unidec.bundle.answer import Answerer, LabelQuery
from unidec.bundle.bundle import Bundle
from unidec.bundle.predict_file import (
    FileRequest,
    begin_predictions,
    merge,
    write_shard,
)
from unidec.data.shards import Work, shards_folder
from unidec.errors import ArtifactError, DataError

WORDS = ["red", "blue", "car", "house", "xyz", "größer", '"neu"', "a\nb", ","]
BATCH = 4


@pytest.fixture(autouse=True)
def _stub(stub_model):
    """Every bundle here is of the stub model."""


@pytest.fixture
def texts(rng) -> list[str]:
    return [" ".join(rng.choice(WORDS, rng.integers(0, 4))) or "-" for _ in range(61)]


def write_queries(path: Path, texts: list[str], row_group_size: int = 10) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(
            pa.table({"id": range(len(texts)), "query": texts}), path, row_group_size=row_group_size
        )
    elif path.suffix == ".csv":
        cells = ['"' + text.replace('"', '""') + '"' for text in texts]
        path.write_text(
            "id,query\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells)),
            encoding="utf-8",
        )
    else:
        path.write_text(
            "\n".join(json.dumps({"query": text}) for text in texts) + "\n", encoding="utf-8"
        )
    return path


def plan(
    bundle: Path, source: Path, output: Path, k: int = 5, shards: int | None = None, **options
) -> Work:
    options = {"runtime": "torch"} | options
    return begin_predictions(
        FileRequest(str(bundle), str(source), str(output), k, **options), shards
    )


def run(work: Work, numbers=None) -> None:
    for number in work.missing() if numbers is None else numbers:
        write_shard(work, number)


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("output", ["out.parquet", "out.csv", "out.tsv", "out.jsonl"])
def test_shards_give_the_bytes_of_one_piece(rng, tmp_path, texts, ending, output, monkeypatch):
    monkeypatch.setattr("unidec.bundle.predict_file.GROUP_ROWS", 50)
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / f"in{ending}", texts)
    predict_file(
        Bundle.load(tmp_path / "b"), source, tmp_path / "whole" / output, k=3, batch_size=BATCH
    )
    work = plan(
        tmp_path / "b",
        source,
        tmp_path / output,
        3,
        batch_size=BATCH,
        shards=5,
    )
    assert work.num_shards == 5 and work.num_rows == len(texts)
    run(work, [4, 1, 0, 3, 2])  # in any order
    merge(work)
    assert (tmp_path / output).read_bytes() == (tmp_path / "whole" / output).read_bytes()
    assert not shards_folder(tmp_path / output).exists()


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """The first row of each batch that was begun; some batches take longer than the next ones."""
    begun = []
    predict = Bundle.predict_table

    def slow(bundle, texts, k, *, first_row, batch_size):
        begun.append(first_row)
        time.sleep(0.01 * (first_row % (3 * BATCH) == 0))
        return predict(bundle, texts, k, first_row=first_row, batch_size=batch_size)

    monkeypatch.setattr(Bundle, "predict_table", slow)
    return begun


def test_any_number_of_threads_gives_the_same_bytes(rng, tmp_path, texts, monkeypatch, batches):
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.csv", texts)
    outputs = set()
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        output = tmp_path / f"{threads}.parquet"
        predict_file(Bundle.load(tmp_path / "b"), source, output, batch_size=BATCH, shards=2)
        outputs.add(output.read_bytes())
    assert len(outputs) == 1
    assert sorted(batches) == sorted(3 * list(range(0, len(texts), BATCH)))


def test_only_a_few_batches_are_begun_ahead_of_the_file(rng, tmp_path, texts, monkeypatch, batches):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.csv", texts)
    work = plan(tmp_path / "b", source, tmp_path / "out.csv", batch_size=BATCH, shards=1)
    ahead = []
    shown = []

    def show(count: int) -> None:
        ahead.append(len(batches) - len(shown))
        shown.append(count)

    write_shard(work, 0, show)
    assert sum(shown) == len(texts)
    assert max(ahead) <= 2 * 2


def test_an_error_of_one_batch_ends_the_work_which_then_resumes(rng, tmp_path, texts, monkeypatch):
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.csv", texts)
    bundle = Bundle.load(tmp_path / "b")
    output = tmp_path / "out.csv"
    predict = Bundle.predict_table

    def fail(bundle, texts, k, *, first_row, batch_size):
        if first_row == 9 * BATCH:
            raise MemoryError("no memory")
        return predict(bundle, texts, k, first_row=first_row, batch_size=batch_size)

    monkeypatch.setattr(Bundle, "predict_table", fail)
    with pytest.raises(MemoryError, match="no memory"):
        predict_file(bundle, source, output, batch_size=BATCH, shards=4)
    assert not output.exists()
    monkeypatch.setattr(Bundle, "predict_table", predict)
    assert plan(tmp_path / "b", source, output, batch_size=BATCH, shards=4).missing() == [2, 3]
    assert predict_file(bundle, source, output, batch_size=BATCH, shards=4) == len(texts)


def test_a_file_has_the_answers_of_the_server(rng, tmp_path, texts):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    source = write_queries(tmp_path / "in.parquet", texts)
    predict_file(bundle, source, tmp_path / "out.parquet", k=3, batch_size=BATCH)
    table = pq.read_table(tmp_path / "out.parquet")
    answerer = Answerer(bundle, bundle.encoder)
    answers = [answerer.answer([LabelQuery(text, k=3)])[0] for text in texts]
    assert table["label"].to_pylist() == [uid for answer in answers for uid in answer.labels]
    scores = [score for answer in answers for score in answer.scores]
    assert table["score"].to_pylist() == pytest.approx(scores, abs=1e-4)


def test_a_folder_of_part_files_is_one_file(rng, tmp_path, texts):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    whole = write_queries(tmp_path / "in.csv", texts)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, some in (("0.csv", texts[:5]), ("1.parquet", texts[5:40]), ("2.jsonl", texts[40:])):
        write_queries(parts / name, some)
    (parts / "_SUCCESS").touch()
    for source, output in ((whole, "a.csv"), (parts, "b.csv")):
        predict_file(bundle, source, tmp_path / output)
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()
    (parts / "1.jsonl").write_text('{"query": " "}\n')
    with pytest.raises(DataError, match=r"1\.jsonl:1"):
        predict_file(bundle, parts, tmp_path / "b.csv")


def test_what_is_whole_is_not_made_again(rng, tmp_path, texts, monkeypatch):
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.csv", texts)
    given = (tmp_path / "b", source, tmp_path / "out.parquet", 3)
    run(plan(*given, batch_size=BATCH, shards=5), [0, 3])
    made = []
    really = write_shard
    monkeypatch.setattr(
        module, "write_shard", lambda work, number, *a: made.append(number) or really(work, number)
    )
    bundle = Bundle.load(tmp_path / "b")
    assert predict_file(bundle, *given[1:], batch_size=BATCH, shards=5) == len(texts)
    assert made == [1, 2, 4]
    predict_file(bundle, *given[1:3], 2, batch_size=BATCH, shards=5)  # another k: everything again
    assert made[3:] == [0, 1, 2, 3, 4]
    assert pq.read_table(tmp_path / "out.parquet")["rank"].to_pylist() == [1, 2] * len(texts)


def test_another_input_bundle_or_setting_is_another_work(rng, tmp_path, texts):
    write_tiny_bundle(tmp_path / "b", rng)
    write_tiny_bundle(tmp_path / "b2", rng, clf_weight=0.25)
    source = write_queries(tmp_path / "in.parquet", texts)
    other = write_queries(tmp_path / "other.parquet", [*texts[:-1], "red boat"])
    keys = [
        plan(bundle, file, tmp_path / "out.parquet", **({"batch_size": BATCH} | more)).key
        for bundle, file, more in [
            (tmp_path / "b", source, {}),
            (tmp_path / "b2", source, {}),
            (tmp_path / "b", other, {}),
            (tmp_path / "b", source, {"k": 2}),
            (tmp_path / "b", source, {"batch_size": 8}),
        ]
    ]
    assert len(set(keys)) == 5


def test_an_input_or_bundle_that_changes_meanwhile(rng, tmp_path, texts):
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.parquet", texts)
    work = plan(
        tmp_path / "b",
        source,
        tmp_path / "out.parquet",
        batch_size=BATCH,
        shards=3,
    )
    run(work, [0])
    with pytest.raises(
        ArtifactError, match=r"2 of 3 shards are missing.*\n.*shard 2 of 3 \(rows 20 to 39\)"
    ):
        merge(work)
    write_queries(source, texts[:-1])  # the work has its copy
    run(work, [1])
    write_tiny_bundle(tmp_path / "b", rng, clf_weight=0.125)
    module.open_bundle.cache_clear()  # as in a process that has not loaded it
    with pytest.raises(ArtifactError, match="the bundle differs"):
        run(work, [2])
    assert not (tmp_path / "out.parquet").exists()
    assert plan(
        tmp_path / "b", source, tmp_path / "out.parquet", batch_size=BATCH, shards=3
    ).missing() == [0, 1, 2]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_blank_texts_are_refused_with_their_lines_before_anything_is_predicted(
    rng, tmp_path, ending
):
    write_tiny_bundle(tmp_path / "b", rng)
    blank = ["\u200b", " ", "\u00a0\u3000", "\ufeff", " \u2060", "\u200b\u200b"]
    texts = ["red", *blank, "car"]
    source = tmp_path / f"in{ending}"
    if ending in (".csv", ".tsv"):
        source.write_text(
            "query,id\n".replace(",", "\t" if ending == ".tsv" else ",")
            + "".join(f"{text}{',' if ending == '.csv' else chr(9)}1\n" for text in texts)
        )
    else:
        write_queries(source, texts)
    first = {".csv": 3, ".tsv": 3, ".jsonl": 2, ".parquet": 2}[ending]
    with pytest.raises(DataError) as error:
        predict_file(Bundle.load(tmp_path / "b"), source, tmp_path / "out.parquet")
    words = str(error.value)
    assert f"{source}:{first}" in words
    assert f"6 blank: in{ending}:{first}, in{ending}:{first + 1}" in words
    assert "and 1 more" in words and not (tmp_path / "out.parquet").exists()


def test_degenerate_inputs(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    for ending in (".csv", ".parquet"):
        empty = write_queries(tmp_path / f"empty{ending}", [])
        if ending == ".parquet":
            pq.write_table(pa.table({"query": pa.array([], pa.string())}), empty)
        assert predict_file(bundle, empty, tmp_path / "out.parquet") == 0
        assert pq.read_table(tmp_path / "out.parquet").num_rows == 0
    one = write_queries(tmp_path / "one.jsonl", ["red"])
    assert predict_file(bundle, one, tmp_path / "out.csv", shards=99) == 1
    (tmp_path / "surrogate.jsonl").write_text('{"query": "a"}\n{"query": "\\ud800"}\n')
    pq.write_table(pa.table({"query": ["a", None]}), tmp_path / "null.parquet")
    for name in ("surrogate.jsonl", "null.parquet", "nothing.csv"):
        with pytest.raises(DataError) as caught:
            predict_file(bundle, tmp_path / name, tmp_path / "never.csv")
        assert name in str(caught.value)
        assert not list(tmp_path.glob("never*"))
    with pytest.raises(DataError, match="unknown format"):
        plan(tmp_path / "b", one, tmp_path / "out.xlsx")
    with pytest.raises(DataError, match="k is out of range"):
        plan(tmp_path / "b", one, tmp_path / "out.csv", 0)


KILLED = """
import os, sys, time
print(os.getpid(), flush=True)
sys.path.insert(0, sys.argv[1])
from helpers import tiny_bundle
import unidec.bundle.bundle as bundle
bundle._load_model = lambda path, device: tiny_bundle.StubModel(path)
predict = bundle.Bundle.predict_table
bundle.Bundle.predict_table = lambda *a, **o: (time.sleep(0.02), predict(*a, **o))[1]
loaded = bundle.Bundle.load(sys.argv[2])
tiny_bundle.predict_file(loaded, *sys.argv[3:5], k=3, batch_size=4, shards=16)
"""


def test_killed_and_started_again(rng, tmp_path, texts, warm_python):
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.csv", texts)
    output = tmp_path / "out.parquet"
    predict_file(
        Bundle.load(tmp_path / "b"), source, tmp_path / "whole.parquet", k=3, batch_size=BATCH
    )
    folder = str(Path(__file__).parents[1])  # of tiny_bundle
    words = [*warm_python, "-c", KILLED, folder, str(tmp_path / "b"), str(source), str(output)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    end = time.monotonic() + 60
    while len(list(shards_folder(output).glob("0*"))) < 3:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert not output.exists()
    work = plan(tmp_path / "b", source, output, 3, batch_size=BATCH, shards=16)
    kept = {
        number: work.path(number).stat().st_mtime_ns
        for number in set(range(16)) - set(work.missing())
    }
    assert work.num_shards == 16 and 3 <= len(kept) < 16
    run(work)
    # not written again
    assert kept == {number: work.path(number).stat().st_mtime_ns for number in kept}
    merge(work)
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b",
        "in.csv",
        "model",
        "out.parquet",
        "whole.parquet",
    ]


def test_the_runtime_that_was_asked_for_encodes_every_shard(rng, tmp_path, texts, monkeypatch):
    write_tiny_bundle(tmp_path / "b", rng)
    source = write_queries(tmp_path / "in.csv", texts)
    opened = []

    def open_encoder(bundle, runtime, threads=0):
        opened.append((runtime, threads))
        return bundle.encoder

    monkeypatch.setattr(module, "open_encoder", open_encoder)
    work = plan(
        tmp_path / "b", source, tmp_path / "out.csv", batch_size=BATCH, shards=3, runtime="onnx"
    )
    run(work, [0])
    # one thread for each batch, and batches in parallel
    assert opened == [("onnx", 1)]
    # shards of another runtime are not joined with these: they may round otherwise
    other = plan(
        tmp_path / "b",
        source,
        tmp_path / "out.csv",
        batch_size=BATCH,
        shards=3,
    )
    assert len(other.missing()) == 3
    run(other)
    assert len(opened) == 1
