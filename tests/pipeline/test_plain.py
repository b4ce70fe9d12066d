"""Results as JSON has them: every field in its order, but for those that say nothing."""

from __future__ import annotations

import json

from unidec.pipeline import plain
from unidec.pipeline.label_stages import ChangedLabels
from unidec.pipeline.registration import Registration
from unidec.pipeline.start import ChosenStart
from unidec.ranking.index_tune import Measured


def test_what_does_not_apply_is_left_out_and_what_is_unknown_is_null() -> None:
    cold = plain(ChosenStart(kind="cold", reason="asked for"))
    warm = ChosenStart(
        kind="warm", model="m", version="1", bundle_sha256="0", generation=1, reason="the champion"
    )
    assert cold == {"kind": "cold", "reason": "asked for"}
    assert list(plain(warm)) == [
        "kind",
        "model",
        "version",
        "bundle_sha256",
        "generation",
        "reason",
    ]
    # no server shows the run's page: null, as before it was a dataclass
    assert plain(Registration("m", 1, "challenger", None)) == {
        "model": "m",
        "version": 1,
        "alias": "challenger",
        "run": None,
    }


def test_results_inside_others() -> None:
    change = ChangedLabels(
        changed=True, bundle=None, registered=Registration("m", 1, "challenger", "address")
    )
    assert plain(change) == {
        "changed": True,
        "bundle": None,
        "registered": plain(change.registered),
    }
    measured = Measured("PQx4", "k_factor_rf=2", 1.0, 0.1, 0.2, 10, 1.0)
    found = plain({"measured": [measured], "pairs": (1, None)})
    assert found["pairs"] == [1, None]
    assert json.loads(json.dumps(found)) == found
    assert found["measured"][0]["search"] == "k_factor_rf=2"
