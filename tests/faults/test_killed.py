"""Fault 1: SIGKILL the trainer anywhere: it ends with the bits of one never killed, and loses an
interval at most.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unidec.data.json_file import read_json_lines
from unidec.training.checkpoint import load_checkpoint

LIFE = Path(__file__).with_name("life.py")
TIMES = ("seconds", "texts_per_s", "tokens_per_s")


@pytest.fixture
def chance() -> random.Random:
    """UNIDEC_TEST_SEED, printed on failure, brings the same kills back."""
    seed = int(os.environ.get("UNIDEC_TEST_SEED", random.randrange(2**31)))
    print(f"UNIDEC_TEST_SEED={seed}")
    return random.Random(seed)


class Lives:
    """Lives of one training in processes that this one may kill."""

    def __init__(self, job: dict[str, Any], folder: Path, warm: bool):
        self.job = job
        self.folder = folder
        self.warm = warm
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Lives:
        if self.warm:
            self._server = self._start("warm", self.job, "--warm")
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.kill()
            _bury(self._server)

    def _start(self, name: str, job: dict[str, Any], *options: str) -> subprocess.Popen[str]:
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(job))
        with open(self.folder / f"{name}.err", "w") as errors:
            return subprocess.Popen(
                [sys.executable, str(LIFE), str(file), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(LIFE.parents[1])},
            )

    def live(self, run: str, kill: Callable[[str], bool]) -> list[str]:
        """One life, killed when `kill` says so of a line. Gives its lines, up to "end" or to where
        it was killed.
        """
        if self._server is None:
            child = self._start("life", self.job | {"run": str(self.folder / run)})
            pid = child.pid
        else:
            child = self._server
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps({"run": str(self.folder / run)}) + "\n")
            child.stdin.flush()
            pid = int(child.stdout.readline().split()[1])
        lines = []
        assert child.stdout is not None
        for line in child.stdout:
            if line == "gone\n":
                break
            lines.append(line.strip())
            if kill(lines[-1]):
                os.kill(pid, signal.SIGKILL)
                kill = lambda _: False  # noqa: E731
                killed_at = len(lines)
                lines_after = [one.strip() for one in _until_gone(child)]
                return lines[:killed_at] + [
                    one for one in lines_after if one.startswith(("step", "end"))
                ]
        if self._server is None:
            _bury(child)
        assert lines and lines[-1] == "end", (
            lines[-3:],
            (self.folder / self._errors).read_text()[-2000:],
        )
        return lines

    @property
    def _errors(self) -> str:
        return "warm.err" if self.warm else "life.err"


def _until_gone(child: subprocess.Popen[str]) -> Iterator[str]:
    assert child.stdout is not None
    for line in child.stdout:
        if line == "gone\n":
            return
        yield line
    _bury(child)


def _bury(child: subprocess.Popen[str]) -> None:
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def steps_of(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith(("step", "at"))]


def outcome(run_dir: Path) -> tuple[dict[str, torch.Tensor], list[dict], list[dict]]:
    """All tensors of the last checkpoint, the history without its clock, the validation of each
    round.
    """
    loaded, refused = load_checkpoint(run_dir)
    assert loaded is not None and refused == []
    tensors = dict(loaded.dense)
    tensors |= {
        f"{table}/{name}": x
        for table, part in loaded.rows.items()
        for name, x in part.tensors.items()
    }
    history = [
        {k: v for k, v in line.items() if k not in TIMES}
        for line in read_json_lines(run_dir / "history.jsonl")
    ]
    return tensors, history, read_json_lines(run_dir / "rounds.jsonl")


def kill_and_compare(
    lives: Lives, chance: random.Random, num_kills: int, interval: int
) -> dict[str, Any]:
    """Train once in one life and once in many; every life but the last is killed, the kills spread
    over the steps.
    """
    with lives:
        whole = lives.live("whole", lambda _: False)
        total = steps_of(whole)[-1]
        targets = sorted(chance.sample(range(1, total), num_kills))
        reached = 0
        lost = []
        moments = []
        for target in targets:
            # now and then it is not a step that is cut off but what lies between two
            other = chance.choice(["", "", "", "refresh", "validate", "at"])
            pause = chance.random() * 0.02

            def kill(
                line: str, target: int = target, other: str = other, pause: float = pause
            ) -> bool:
                word = line.split()[0]
                due = (word == "step" and int(line.split()[1]) >= target) or (word == other != "")
                if due:
                    time.sleep(pause)
                return due

            lines = lives.live("killed", kill)
            begun = steps_of(lines)[0]
            done = steps_of(lines)[-1]
            lost.append(reached - begun)
            # what was killed may have written a line more than this process had read
            reached = max(reached, done)
            moments.append(lines[-1])
        lines = lives.live("killed", lambda _: False)
        lost.append(reached - steps_of(lines)[0])
    ours = outcome(lives.folder / "killed")
    theirs = outcome(lives.folder / "whole")
    assert ours[0].keys() == theirs[0].keys()
    assert [name for name in ours[0] if not torch.equal(ours[0][name], theirs[0][name])] == []
    assert ours[1] == theirs[1]
    assert len(ours[1]) == total
    assert ours[2] == theirs[2]
    assert len(ours[2]) > 1
    print(f"killed at {moments}, steps lost {lost}")
    assert max(lost) <= interval
    return {"lost": lost, "total": total}


@pytest.mark.parametrize(
    ("overrides", "num_kills"),
    [
        ({"encoder.bag_dropout": 0.2}, 4),
        pytest.param(
            {
                "pool.gandalf": True,
                "pool.clf_labels": "all",
                "optim.clf_state": "adagrad",
                "model.clf_bias": True,
            },
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bag", "gandalf"],
)
def test_killed_at_random_steps(
    tiny_dataset: Any,
    tiny_tokens: Any,
    tiny_params: Any,
    memory_folder: Path,
    chance: random.Random,
    overrides: dict,
    num_kills: int,
) -> None:
    params = tiny_params(**{"run.checkpoint_steps": 3, "model.dropout": 0.2} | overrides)
    job = {
        "params": params.model_dump(),
        "dataset": str(tiny_dataset.path),
        "cache": str(memory_folder / "cache"),
        "queries": str(tiny_tokens["queries"].path),
        "labels": str(tiny_tokens["labels"].path),
    }
    kill_and_compare(Lives(job, memory_folder, warm=True), chance, num_kills, interval=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "gandalf", "num_kills"),
    [
        ("slice", False, 20),
        ("slice", True, 5),
        ("whole", False, 20),
    ],
)
def test_killed_on_the_default_data(
    slice_dataset: Any,
    lf_debian_path: Path,
    tiny_params: Any,
    tmp_path: Path,
    memory_folder: Path,
    chance: random.Random,
    size: str,
    gandalf: bool,
    num_kills: int,
) -> None:
    """The default data or a slice of it, its tokenizer, a bag encoder; small heads, a refresh every
    two epochs.
    """
    from unidec.data.dataset import write_dataset
    from unidec.data.formats import read_raw
    from unidec.data.tokens import build_token_cache
    from unidec.model.sources import resolve_encoder

    encoder = resolve_encoder("all-MiniLM-L6-v2")
    dataset = (
        slice_dataset
        if size == "slice"
        else write_dataset(tmp_path / "dataset", read_raw(lf_debian_path))
    )
    sizes = {"queries": dataset.num_queries, "labels": dataset.num_labels}
    for name, count in sizes.items():
        build_token_cache(dataset.text_batches(name), encoder, 32, tmp_path / name, count)
    interval = 4 if size == "slice" else 10
    params = tiny_params(
        **{
            "encoder.name": str(encoder),
            "tokens.max_length": 32,
            "pool.batch_size": 128 if size == "slice" else 512,
            "pool.refresh": 2,
            "optim.epochs": 4,
            "encoder.bag_dropout": 0.3,
            "pool.gandalf": gandalf,
            "run.checkpoint_steps": interval,
        }
    )
    job = {
        "params": params.model_dump(),
        "dataset": str(dataset.path),
        "cache": str(tmp_path / "cache"),
        "queries": str(tmp_path / "queries"),
        "labels": str(tmp_path / "labels"),
    }
    # processes of their own for the whole set; children of a warm one, which imports once, for the
    # slice
    found = kill_and_compare(
        Lives(job, memory_folder, warm=size == "slice"), chance, num_kills, interval
    )
    # with Gandalf labels are queries too
    assert found["total"] == 4 * (16 if size == "slice" and not gandalf else 64)
