"""What every section of the configuration is made of. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Section",
]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, docstrings of fields become their help."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )

    def _changed(self, keys: Collection[str] | None = None) -> list[str]:
        """The fields, of all or of `keys`, that are not at their default, sorted."""
        fields = type(self).model_fields
        wanted = fields if keys is None else keys
        return sorted(
            key
            for key in wanted
            if getattr(self, key) != fields[key].get_default(call_default_factory=True)
        )

    def _refuse_ignored(self, section: str, keys: Collection[str], why: str) -> None:
        """Raise ValueError when one of `keys` was set although it has no effect.

        Args:
            section: the dotted name of this section.
            keys: fields without effect.
            why: what makes them so.
        """
        present = self._changed(keys)
        if present:
            flags = ", ".join(f"{section}.{key}" for key in present)
            raise ValueError(
                f"{flags} would be ignored, since {why}: remove it, or set it to its default"
            )
