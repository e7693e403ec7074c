"""What is kept in files is typed: written as it stands, validated whenever it is read, refused where it says more."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

INFINITE: Literal["strings"] = "strings"  # in JSON, which knows no infinity: "Infinity", "-Infinity", "NaN"
_anything: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan=INFINITE))


def plain(value: Any) -> Any:
    """As JSON holds it: tables with names, lists, texts and finite numbers."""
    return json.loads(_anything.dump_json(value))


class Kept(BaseModel):
    """A part of a run record, or of what lies beside it. Infinity is a string in JSON, which knows no such number."""

    model_config = ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        ser_json_inf_nan=INFINITE,
        populate_by_name=True,
        serialize_by_alias=True,
    )


class Sparse(Kept):
    """A part some of whose tables are written only where there is something in them."""

    optional: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_empty_tables(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value or key not in self.optional}


class AsGiven(Kept):
    """A part that is written with the fields that it was given, and without the others."""

    @model_serializer(mode="wrap")
    def _without_what_was_not_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        given = {fields[name].alias or name for name in self.model_fields_set}
        return {key: value for key, value in dump(self).items() if key in given}
