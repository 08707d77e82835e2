"""A method's parameters for one model: the authors', a calibration's, the operator's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.findings import reasons_of
from kvsieve.core.pruning import Prune, parse_prune
from kvsieve.pruning.calibration import Calibration, read_calibration
from kvsieve.pruning.method import AUTHORS_LAYERS, PRUNE_METHODS, PruneMethod


class PruneOptions(BaseModel):
    """The keys of `prune_options`; what is None is the authors' or the calibration's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layer: Annotated[int, Field(ge=0, le=9999)] | None = None
    observed_layers: Annotated[int, Field(ge=2, le=9999)] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    max_layer: Annotated[int, Field(ge=0, le=9999)] | None = None
    window: Annotated[int, Field(ge=1, le=1024)] | None = None
    pooling: Literal["max", "avg"] | None = None
    pool_size: Annotated[int, Field(ge=1, le=511)] | None = None
    num_sink_tokens: Annotated[int, Field(ge=0, le=1024)] | None = None

    @field_validator("pool_size")
    @classmethod
    def _pool_is_odd(cls, value: int | None) -> int | None:
        if value is not None and value % 2 == 0:
            raise ValueError(f"the width must be odd, got {value}")
        return value


@dataclass(frozen=True)
class PruneSettings:
    """Everything that a method needs to know to prune prompts of one model.

    Attributes:
        method: The method.
        layer: The selection layer; for an adaptive method the first judged layer.
        observed_layers: Layers whose ranks are compared.
        threshold: Ranks have settled where their variance is below this share of that at `layer`.
        max_layer: The layer at which a prompt is pruned whose ranks have not settled; None to
            leave it whole.
        window: Last queries that score, in tokens.
        pooling: Kind of pooling over neighbours.
        pool_size: Its width, in tokens.
        num_sink_tokens: First tokens that are always kept; the authors keep none.
        num_layers: Layers of the model.
    """

    method: PruneMethod
    layer: int
    observed_layers: int
    threshold: float
    max_layer: int | None
    window: int
    pooling: Literal["max", "avg"]
    pool_size: int
    num_sink_tokens: int
    num_layers: int

    def __str__(self) -> str:
        where = f"after layer {self.layer}"
        if self.method.is_adaptive:
            where = (
                f"after layer {self.layer + 1} to {self.last_scored_layer}, threshold"
                f" {self.threshold:g} over {self.observed_layers} layers"
            )
            if self.max_layer is None and self.method.num_passes == 1:
                where += ", or not at all"
        passes = ", two passes" if self.method.num_passes == 2 else ""
        return (
            f"{self.method.name} of {self.num_layers} layers: {where}; window {self.window},"
            f" pooling {self.pooling} {self.pool_size}, {self.num_sink_tokens} sinks{passes}"
        )

    @property
    def num_recent(self) -> int:
        """Last tokens of the prompt that are always kept."""
        return self.window if self.method.scores_by == "window" else 0

    @property
    def first_scored_layer(self) -> int:
        """The first layer whose scores are needed."""
        return self.layer - self.observed_layers + 1 if self.method.is_adaptive else self.layer

    @property
    def last_scored_layer(self) -> int:
        """The last layer at which a prompt can be pruned."""
        if not self.method.is_adaptive:
            return self.layer
        # After the last layer nothing is left to be saved, except for a second pass.
        deepest = self.num_layers - (1 if self.method.num_passes == 2 else 2)
        return deepest if self.max_layer is None else min(self.max_layer, deepest)


def check_prune_options(options: Mapping[str, Any]) -> PruneOptions:
    """The operator's `prune_options`, as far as they can be judged without a model.

    Raises:
        ConfigError: Every problem found, in words.
    """
    try:
        return PruneOptions.model_validate(dict(options))
    except ValidationError as error:
        reasons = reasons_of(error, options, list(PruneOptions.model_fields))
        raise ConfigError([f"prune_options: {reason}" for reason in reasons]) from None


def prune_settings(
    prune: Prune,
    options: PruneOptions,
    num_layers: int,
    calibrated: Mapping[str, Any] | None = None,
) -> PruneSettings:
    """The parameters of a method for a model.

    A request's own layer comes first, then the operator's options, then the calibration, and last
    the authors' numbers, of which layers are scaled from their 32 to the model's depth.

    Args:
        prune: What the request, or the operator, asks for.
        options: The operator's options.
        num_layers: Layers of the model.
        calibrated: The calibration's `layer`, `threshold` and `max_layer` for this method.

    Raises:
        ConfigError: They do not fit the model, with every reason.
    """
    method = PRUNE_METHODS[prune.method]
    known = dict(calibrated or {})

    def pick(name: str, authors: Any) -> Any:
        given = getattr(options, name)
        return known.get(name, authors) if given is None else given

    observed = pick("observed_layers", min(method.observed_layers, max(2, num_layers // 3)))
    layer = prune.layer
    if layer is None:
        scaled = round(method.layer * num_layers / AUTHORS_LAYERS)
        layer = pick("layer", max(scaled, observed - 1) if method.is_adaptive else scaled)
    settings = PruneSettings(
        method=method,
        layer=layer,
        observed_layers=observed,
        threshold=pick("threshold", method.threshold),
        max_layer=pick("max_layer", None),
        window=pick("window", method.window),
        pooling=pick("pooling", method.pooling),
        pool_size=pick("pool_size", method.pool_size),
        num_sink_tokens=pick("num_sink_tokens", 0),
        num_layers=num_layers,
    )
    if reasons := _refusals(settings):
        raise ConfigError([f"{prune}: {reason}" for reason in reasons])
    return settings


@dataclass(frozen=True)
class ModelPruning:
    """The operator's parameters, for any method that a request may ask for.

    Attributes:
        prune: What is done to requests that do not say.
        options: The operator's options. Of layers and threshold they hold for `prune`'s method.
        calibration: Where the model's methods select; None if that was not measured.
    """

    prune: Prune
    options: PruneOptions
    calibration: Calibration | None = None

    def settings(self, prune: Prune, num_layers: int) -> PruneSettings:
        """The parameters of a method for a model with so many layers.

        Raises:
            ConfigError: They do not fit the model.
        """
        options = self.options
        if prune.method != self.prune.method:
            # Another method's layers would be taken for this one's.
            options = options.model_copy(update=dict.fromkeys(_OF_ONE_METHOD))
        elif prune.layer is None:
            prune = Prune(prune.method, self.prune.layer)
        calibration = self.calibration
        if calibration is not None and calibration.num_layers != num_layers:
            raise ConfigError(
                [
                    f"prune_calibration is of {calibration.model} with {calibration.num_layers}"
                    f" layers, and this model has {num_layers}"
                ]
            )
        calibrated = calibration.for_method(prune.method) if calibration else {}
        return prune_settings(prune, options, num_layers, calibrated)

    def check_calibration(self, num_layers: int) -> None:
        """Check what the calibration says of every method that it knows.

        Raises:
            ConfigError: It does not fit a model with so many layers; every reason.
        """
        reasons: list[str] = []
        for name in self.calibration.methods if self.calibration else ():
            try:
                self.settings(Prune(name), num_layers)
            except ConfigError as error:
                reasons += [reason for reason in error.reasons if reason not in reasons]
        if reasons:
            raise ConfigError(reasons)


def pruning_from_config(config: SieveConfig) -> ModelPruning | None:
    """How the operator wants prompts pruned; None for not at all.

    Raises:
        ConfigError: Options or calibration cannot be read; every problem found.
    """
    prune = parse_prune(config.prune)
    if prune is None:
        if config.prune_options or config.prune_calibration:
            raise ConfigError(
                ["prune_options and prune_calibration do nothing while prune is 'none'"]
            )
        return None
    options = check_prune_options(config.prune_options)
    path = config.prune_calibration
    return ModelPruning(prune, options, read_calibration(path) if path else None)


_OF_ONE_METHOD = (
    "layer",
    "observed_layers",
    "threshold",
    "max_layer",
    "window",
    "pooling",
    "pool_size",
)


def _refusals(settings: PruneSettings) -> list[str]:
    """Why settings do not fit their model."""
    last = settings.num_layers - (1 if settings.method.num_passes == 2 else 2)
    if not settings.method.is_adaptive:
        if settings.layer > last:
            return [
                f"layer must be in [0, {last}] ({settings.num_layers} layers in all), got"
                f" {settings.layer}"
            ]
        return []
    reasons = []
    lowest = settings.observed_layers - 1
    if not lowest <= settings.layer < last:
        reasons.append(
            f"layer must be in [{lowest}, {last - 1}] ({settings.observed_layers} observed layers,"
            f" {settings.num_layers} in all), got {settings.layer}"
        )
    if settings.max_layer is not None and not settings.layer < settings.max_layer <= last:
        reasons.append(
            f"max_layer must be in [{settings.layer + 1}, {last}], got {settings.max_layer}"
        )
    return reasons
