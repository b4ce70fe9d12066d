"""What a section of params.yaml consists of: keys with type, bounds, default, description and the
results that they decide, and conflicts of values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Result = Literal[
    "data",
    "checks",
    "tokens",
    "propensity",
    "label_graph",
    "training",
    "index",
    "evaluation",
    "operation",
]
"""What a parameter decides, in the order of the pipeline: the data set, whether its checks pass,
the token caches, propensities of labels, label graph, trained model, bundle, metrics; or only where
and how something runs ("operation"). """


def key(default: Any, description: str, *decides: Result) -> Any:
    """A parameter's default, its description and the results that it decides, if not those of its
    section.
    """
    return Field(
        default,
        description=description,
        json_schema_extra={"decides": list(decides)} if decides else None,
    )


class Conflict(NamedTuple):
    """Values that are each valid but conflict with each other.

    Attributes:
        keys: their key paths, separated by spaces; the error is reported at the first one.
        what, fix: what is wrong, and what to set instead.
    """

    keys: str
    what: str
    fix: str


class Section(BaseModel):
    """A frozen group of parameters that rejects unknown keys.

    Attributes:
        decides: the first results that these parameters decide, unless a key says otherwise; what
            is made from them follows.
    """

    decides: ClassVar[tuple[Result, ...]] = ("operation",)

    # strict: "3" is not accepted as a number, nor true as a count, so that a typing error is
    # reported
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def decided(cls, prefix: str = "") -> dict[str, tuple[Result, ...]]:
        """The results that each key decides, by its path."""
        found: dict[str, tuple[Result, ...]] = {}
        for name, field in cls.model_fields.items():
            own = field.json_schema_extra  # of `key`
            if isinstance(field.default, Section):
                found |= field.default.decided(f"{name}.")
            elif isinstance(own, dict):
                found[prefix + name] = tuple(cast("list[Result]", own["decides"]))
            else:
                found[prefix + name] = cls.decides
        return found

    def conflicts(self) -> Iterator[Conflict]:
        """All conflicts between the values of this section."""
        yield from ()
