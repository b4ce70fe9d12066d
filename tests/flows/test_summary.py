"""What `make train` prints at its end: about ten lines, figures beside champion and baselines,
commands to try.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flows.decide import summary

FIGURES = {"P@1": 47.04, "P@5": 22.55, "nDCG@5": 45.76, "PSP@5": 29.01, "R@100": 77.69, "MRR": 57.1}
BASELINES = {"knn": {"P@1": 40.3, "R@100": 64.0}, "mix": {"P@1": 41.3, "R@100": 67.7}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    (tmp_path / "Makefile").touch()
    return tmp_path


@pytest.fixture
def promoted(here: Path) -> dict[str, Any]:
    """What the flow returns for a version that beat the champion."""
    verdict = {
        "passed": True,
        "champion": "3",
        "metrics": {"champion": FIGURES | {"P@1": 44.0}, "challenger": FIGURES},
    }
    return {
        "steps": ["train", "evaluate", "register"],
        "metrics": FIGURES,
        "baselines": BASELINES,
        "warnings": [],
        "report": str(here / "outputs" / "report.html"),
        "model": "unidec",
        "version": "4",
        "gate": verdict,
        "promoted": {"previous": "3"},
    }


def test_a_new_champion(promoted: dict[str, Any]) -> None:
    lines = summary(promoted).splitlines()
    assert len(lines) == 11
    table = {line[:30].strip(): line[30:].split() for line in lines[:5]}
    assert table["test split, percent"] == ["P@1", "P@5", "nDCG@5", "PSP@5", "R@100"]
    assert table["version 4"] == ["47.0", "22.6", "45.8", "29.0", "77.7"]
    assert table["former champion, version 3"][0] == "44.0"
    assert (
        table["TF-IDF kNN"] == ["40.3", "-", "-", "-", "64.0"]
        and "TF-IDF kNN + label match" in table
    )
    assert (
        lines[5]
        == "version 4 of unidec is the champion; `unidec models rollback` returns to version 3"
    )
    assert lines[6] == "report: outputs/report.html"
    program = os.path.join(".venv", "bin", "unidec")
    assert [line.strip() for line in lines[8:]] == [
        f'{program} predict "some text" -k 5',
        f"{program} serve models:/unidec@champion",
        "make ui",
    ]


def test_a_refused_version_and_warnings(promoted: dict[str, Any]) -> None:
    del promoted["promoted"]
    promoted |= {
        "refused": "nDCG@5:\n  2.1 behind",
        "warnings": ["P@1: 100.0."],
        "run_url": "http://127.0.0.1:5731/#/ab",
    }
    text = summary(promoted)
    assert "MLflow run: http://127.0.0.1:5731/#/ab\n" in text
    assert "version 4 of unidec is not promoted, see outputs/gate.html: nDCG@5: 2.1 behind" in text
    assert "warning: P@1: 100.0." in text and "\nchampion, version 3" in text
    assert "serve models:/unidec@champion" in text, "the champion that stays"
    assert "serve outputs/bundle" in summary(promoted | {"no_champion": {"version": "4"}})


def test_nothing_to_train(here: Path) -> None:
    done = {
        "steps": ["register"],
        "model": "unidec",
        "version": "4",
        "run_url": None,
        "skipped": "nothing changed",
    }
    assert summary(done).startswith(
        "nothing to train: nothing changed; the model is version 4 of unidec\nreport: "
    )


def test_a_trial_names_its_own_folder(promoted: dict[str, Any], here: Path) -> None:
    trial = {key: promoted[key] for key in ("steps", "metrics", "baselines", "warnings")}
    text = summary(trial | {"report": str(here / "runs/own/abc/outputs/report.html")})
    assert "report: runs/own/abc/outputs/report.html" in text and "not registered" in text
    assert 'predict "some text" -k 5 --bundle runs/own/abc/outputs/bundle' in text
    assert "serve runs/own/abc/outputs/bundle" in text


def test_a_registered_trial_is_no_champion(promoted: dict[str, Any], here: Path) -> None:
    del promoted["promoted"], promoted["gate"]
    text = summary(promoted | {"report": str(here / "runs/own/abc/outputs/report.html")})
    assert "version 4 of unidec is registered" in text and "@champion" not in text
    assert 'predict "some text" -k 5 --bundle runs/own/abc/outputs/bundle' in text
    assert "serve runs/own/abc/outputs/bundle" in text


def test_steps_of_dvc_are_one_line(here: Path) -> None:
    assert (
        summary(
            {
                "steps": ["train"],
                "epoch": 12,
                "run_url": None,
            }
        )
        == "done: train"
    )
