"""An edit of a label set: against a dictionary edited by hand, and every mistake in one message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_bundle as tiny

from unidec.errors import DataError
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.label_change import MOST_SHOWN, LabelChange, LabelText


@pytest.fixture
def bundle(tmp_path: Path, rng: np.random.Generator, stub_model: None) -> Bundle:
    tiny.write_tiny_bundle(tmp_path / "bundle", rng)
    return Bundle.load(tmp_path / "bundle")


def labels_of(change: LabelChange) -> dict[str, str]:
    return dict(zip(change.uids.to_pylist(), change.titles.to_pylist(), strict=True))


@pytest.mark.parametrize("long_texts", [False, True])
def test_an_edit_is_that_of_a_dictionary(bundle: Bundle, rng: np.random.Generator, long_texts: bool) -> None:
    if long_texts:
        bundle.info = bundle.info.model_copy(update={"text": "title+content"})
    before = dict(zip(tiny.UIDS, tiny.TITLES, strict=True))
    for _ in range(30):
        picked = rng.permutation(tiny.UIDS).tolist()
        gone, said = picked[: rng.integers(0, 8)], picked[8 : 8 + rng.integers(0, 4)]
        new = [f"N{i}" for i in range(rng.integers(0, 4))]
        update = [LabelText(uid, f"{uid} text", f"{uid} shown") for uid in said]
        add = [LabelText(uid, f"{uid} text") for uid in new]
        change = LabelChange.edit(bundle, add, gone, update)
        wanted = {uid: title for uid, title in before.items() if uid not in gone}
        wanted |= {uid: f"{uid} shown" for uid in said} | {uid: f"{uid} text" for uid in new}
        assert labels_of(change) == wanted and list(labels_of(change)) == list(wanted)  # new ones last
        rows = [tiny.UIDS.index(uid) if uid in before else -1 for uid in wanted]
        assert change.source_L.tolist() == rows
        encoded = {change.uids[row].as_py(): text for row, text in zip(change.encoded_S, change.texts_S, strict=True)}
        assert encoded == {item.uid: item.text for item in (*update, *add)}
        assert (np.diff(change.encoded_S) > 0).all()
        assert (change.added, change.removed, set(change.renamed)) == (new, gone, set(said))
        assert bool(change) == bool(new or gone or said)
        kept = len(wanted) - len(new)
        assert change.counts == {"added": len(new), "removed": len(gone), "renamed": len(said), "kept": kept}


def test_what_says_the_same_already_is_no_change(bundle: Bundle) -> None:
    same = [LabelText("L0", "red car"), LabelText("L3", "red boat", "red boat")]
    assert not LabelChange.edit(bundle, update=same)
    change = LabelChange.edit(bundle, update=[*same, LabelText("L1", "green car", "a car")])
    assert change.renamed == ["L1"] and change.texts_S == ["green car"]
    another_text = LabelChange.edit(bundle, update=[LabelText("L0", "scarlet car", "red car")])  # shown as before
    assert another_text.renamed == ["L0"] and another_text.texts_S == ["scarlet car"]


def test_all_mistakes_at_once(bundle: Bundle) -> None:
    with pytest.raises(DataError) as caught:
        LabelChange.edit(
            bundle,
            add=[
                LabelText("L1", "x", where="new.csv:2"),
                LabelText("N", "  "),
                LabelText("N", "y"),
                LabelText(" ", "z"),
            ],
            remove=["L22", "L2", "L2"],
            update=[LabelText("L2", "q"), LabelText("nothing alike", "q")],
        )
    message = str(caught.value)
    for words in (
        "8 labels are not fit; nothing was written", "new.csv:2: 'L1' is in the bundle already", "'N' has no text",
        "'N': add twice", "a label without a uid", "no label 'L22'; did you mean 'L2'?", "'L2': remove twice",
        "'L2': remove and update", "no label 'nothing alike'\n",
    ):  # fmt: skip
        assert words in message, words


def test_many_mistakes_are_cut_and_counted(bundle: Bundle) -> None:
    with pytest.raises(DataError, match=f"and {40 - MOST_SHOWN} more") as caught:
        LabelChange.edit(bundle, remove=[f"gone-{i}" for i in range(40)])
    assert "40 labels" in str(caught.value) and "gone-9'" in str(caught.value) and "gone-10'" not in str(caught.value)


def test_one_label_must_stay(bundle: Bundle) -> None:
    with pytest.raises(DataError, match="needs a label"):
        LabelChange.edit(bundle, remove=tiny.UIDS)
    assert labels_of(LabelChange.edit(bundle, add=[LabelText("N", "x")], remove=tiny.UIDS)) == {"N": "x"}
