"""A calibration file: where a model's methods select, as `kvsieve calibrate` found it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsieve.core.errors import ConfigError
from kvsieve.core.findings import reasons_of
from kvsieve.core.pruning import PruneName


class MethodCalibration(BaseModel):
    """Where one method selects. None leaves the authors' number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: Annotated[int, Field(ge=0)]
    observed_layers: Annotated[int, Field(ge=2)] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    max_layer: Annotated[int, Field(ge=0)] | None = None


class Calibration(BaseModel):
    """What `kvsieve calibrate` found for one model.

    Attributes:
        model: The model's name.
        num_layers: Its depth: a calibration is refused for a model of another.
        kept_share: Share of the prompt that was kept: layers and threshold depend on it.
        methods: By method.
        measured: The curves from which that follows, for people.
        provenance: When, how and on what machine it was measured.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    num_layers: Annotated[int, Field(ge=1)]
    kept_share: Annotated[float, Field(gt=0, lt=1)]
    methods: dict[PruneName, MethodCalibration]
    measured: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)

    def for_method(self, name: str) -> dict[str, Any]:
        """What was found for a method; nothing if it was not looked at."""
        found = self.methods.get(name)  # type: ignore[call-overload]
        return {} if found is None else found.model_dump(exclude_none=True)

    def as_facts(self) -> dict[str, Any]:
        """The content of its file, as JSON values."""
        methods = {name: self.for_method(name) for name in self.methods}
        return {**self.model_dump(mode="json"), "methods": methods}


def read_calibration(path: str) -> Calibration:
    """A calibration from its file.

    Raises:
        ConfigError: It cannot be read, with every reason.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        return Calibration.model_validate(content)
    except ValidationError as error:
        fields = list(Calibration.model_fields)
        reasons = reasons_of(error, content, fields)
        raise ConfigError([f"prune_calibration {path}: {reason}" for reason in reasons]) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError([f"prune_calibration {path} cannot be read: {error}"]) from None
