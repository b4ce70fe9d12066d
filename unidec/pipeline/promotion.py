"""Promotion of what passed the gate, and the way back."""

from __future__ import annotations

from typing import Any

from unidec.config import Params
from unidec.tracking import promotion


def promote(
    params: Params,
    version: str | int | None = None,
    *,
    allow_dirty: bool = False,
    force: bool = False,
    reason: str = "",
) -> dict[str, Any]:
    """A version (None: `challenger`) becomes champion, the champion previous: see `ops.promotion.promote`."""
    return promotion.promote(
        params.tracking.model_name, promotion.CHALLENGER if version is None else version,
        allow_dirty=allow_dirty or params.gate.allow_dirty, force=force, reason=reason,
    )  # fmt: skip


def rollback(params: Params, *, reason: str = "") -> dict[str, Any]:
    """The previous champion answers again: see `ops.promotion.rollback`."""
    return promotion.rollback(params.tracking.model_name, reason=reason)
