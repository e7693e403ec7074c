"""Base classes for stored records: fields are typed, validated on reading, and unknown fields are rejected."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

INFINITE: Literal["strings"] = "strings"  # JSON has no infinity, so it is written "Infinity", "-Infinity" or "NaN"
# Neither is ever negative or NaN. An infinite epsilon stands for no guarantee.
Epsilon = Annotated[float, Field(ge=0)]
Delta = Annotated[float, Field(ge=0, le=1)]
_anything: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan=INFINITE))


def plain(value: Any) -> Any:
    """Return the value as JSON holds it: dicts with string keys, lists, strings and finite numbers."""
    return json.loads(_anything.dump_json(value))


def number_of(value: Any) -> float | None:
    """Return a number as JSON holds it, also an infinite one, which is a text there; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN") else None


class StoredModel(BaseModel):
    """A part of a run record or of a file beside it. Infinity is written as a string, because JSON has no infinity."""

    model_config = ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        ser_json_inf_nan=INFINITE,
        populate_by_name=True,
        serialize_by_alias=True,
    )


class Sparse(StoredModel):
    """A part that leaves out the fields named in `optional` when they are empty."""

    optional: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_empty_tables(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value or key not in self.optional}


class AsGiven(StoredModel):
    """A part that writes only the fields that it was given."""

    @model_serializer(mode="wrap")
    def _without_what_was_not_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        given = {fields[name].alias or name for name in self.model_fields_set}
        return {key: value for key, value in dump(self).items() if key in given}
