"""What a section of params.yaml consists of: keys with type, bounds, default, the results that they
decide, and in a docstring below each its description; and conflicts of values."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import resources
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

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


@functools.cache
def packaged(file: str) -> Any:
    """The content of a YAML file of this package, such as "config/requirements.yaml"; not to be
    changed.
    """
    import yaml

    text = (resources.files("unidec") / file).read_bytes()
    return yaml.load(text, yaml.CSafeLoader)


def matching(form: str, kind: str, text: str) -> BeforeValidator:
    """Refuses a value that is no text of this form (a regular expression), with a `text` about
    valid ones; `kind`: of pydantic's error.
    """

    def known(value: object) -> object:
        if isinstance(value, str) and re.fullmatch(form, value):
            return value
        raise PydanticCustomError(kind, "{text}", {"text": text})

    return BeforeValidator(known)


class Stored(BaseModel):
    """Base of what is stored as JSON: values of other types and unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Decides:
    """In the type of a key: the results that it decides, if not those of its section."""

    def __init__(self, *results: Result) -> None:
        self.results = results


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
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def decided(cls, prefix: str = "") -> dict[str, tuple[Result, ...]]:
        """The results that each key decides, by its path."""
        found: dict[str, tuple[Result, ...]] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section):
                found |= field.default.decided(f"{name}.")
                continue
            found[prefix + name] = cls.decides
            for part in field.metadata:
                if isinstance(part, Decides):
                    found[prefix + name] = part.results
        return found

    def conflicts(self) -> Iterator[Conflict]:
        """All conflicts between the values of this section."""
        yield from ()
