"""The one configuration model, validated before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from kvsieve.core.budget import BudgetRule, smallest_budget
from kvsieve.core.errors import ConfigError
from kvsieve.core.findings import reasons_of
from kvsieve.core.notation import (
    COUNT,
    MAX_BUDGET,
    MAX_LAYERS,
    ROLE,
    parse_budget,
    parse_layer_budgets,
    parse_layer_ranges,
    parse_share,
)
from kvsieve.core.pruning import NO_PRUNING, parse_prune

CONFIG_KEY = "kvsieve"
"""The key of `additional_config` under which vLLM carries our settings."""


class SieveConfig(BaseModel):
    """Settings of the sieve. Every field is a key of `additional_config["kvsieve"]`.

    Unknown keys are errors and name the nearest known one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field(
        default="kvsieve",
        description="How the tokens of the prompt are ranked: a published method by its name"
        " (`kvsieve policies` lists them).",
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters that only this policy has, such as ChunkKV's chunk_length.",
    )
    budget: int | str = Field(
        default=1024,
        description="What a sieved layer keeps of a prompt, in tokens per KV head, or as a share"
        " of the prompt such as '10%'; the mean over these layers where layer_budgets differ.",
    )
    min_budget: Annotated[int, Field(gt=0, le=MAX_BUDGET)] | None = Field(
        default=None,
        description="The operator's lower bound on the budget, in tokens. Default: the smallest"
        " legal budget (recent tokens, sinks and one block).",
    )
    max_budget: Annotated[int, Field(gt=0, le=MAX_BUDGET)] | None = Field(
        default=None,
        description="The operator's upper bound on the budget, in tokens. Default: none.",
    )
    layer_budgets: Literal["uniform", "pyramid"] | dict[str, int | str] = Field(
        default="uniform",
        description="How the budget is spread over the sieved layers: 'uniform'; 'pyramid'"
        " (PyramidKV: more in the first layers, the mean is the budget); or budgets by layers, such"
        ' as {"3-9": 512, "10-29": "5%"}, which name every sieved layer once and are scaled if a'
        " budget is given too. A request's own budget takes the mean's place: a pyramid is made"
        " anew around it, budgets by layers are scaled.",
    )
    max_tiers: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3,
        description="Different budgets that a pyramid may have; each makes cache groups, which cost"
        " host time.",
    )
    mode: Literal["sieve", "shadow", "full"] = Field(
        default="sieve",
        description="'sieve' drops what does not fit the budget; 'shadow' keeps everything and"
        " reports what would be dropped; 'full' does nothing.",
    )
    mode_endpoint: bool = Field(
        default=False,
        description="Whether POST /v1/kvsieve/mode may change the mode of a running server.",
    )
    forced_tokens: bool = Field(
        default=False,
        description="Whether a request may give forced_tokens, which the model is then made to"
        " say; `kvsieve eval` compares distributions that way.",
    )
    full_layers: int | tuple[int, ...] = Field(
        default=0,
        description="Layers that keep the full cache: a count of leading layers, a list, or ranges"
        " such as '0-2,15'.",
    )
    observation_window: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=32,
        description="Last queries of the prompt that score it, in tokens.",
    )
    num_recent_tokens: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        default=None,
        description="Last tokens of the prompt that are always kept. Default: as many as the"
        " observation window.",
    )
    pool_size: Annotated[int, Field(ge=1, le=511)] = Field(
        default=21,
        description="Width of the pooling over neighbouring scores, in tokens; odd.",
    )
    pooling: Literal["max", "avg"] = Field(
        default="avg",
        description="Kind of pooling: the mean of the neighbours or their maximum.",
    )
    num_sink_tokens: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=4,
        description="First tokens of the prompt that are always kept.",
    )

    protect_roles: tuple[str, ...] = Field(
        default=(),
        description="Chat roles whose messages are always kept, such as 'system'.",
    )

    prune: str = Field(
        default="none",
        description="Prefill pruning: 'asl', 'fastkv', 'gemfilter' or 'asl-two-pass', with a layer"
        " if wanted ('fastkv@12'). From the method's layer on, a prompt goes on with as many tokens"
        " as the budget keeps. 'none' prunes nothing, for no request.",
    )
    prune_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters of that method in place of the authors' and the calibration's:"
        " layer, observed_layers, threshold, max_layer, window, pooling, pool_size,"
        " num_sink_tokens.",
    )
    prune_calibration: str | None = Field(
        default=None,
        description="File that `kvsieve calibrate` wrote for this model: the methods' layers.",
    )

    @field_validator(
        *("budget", "min_budget", "max_budget", "max_tiers", "full_layers", "observation_window"),
        *("num_recent_tokens", "pool_size", "num_sink_tokens"),
        mode="before",
    )
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        # bool is an int to pydantic: `"budget": true` would mean one token.
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, bool):
                raise ValueError(f"expected a number or a text, got {each}")
        return value

    @field_validator("budget")
    @classmethod
    def _budget_is_positive(cls, value: int | str) -> int | str:
        return parse_budget(value)

    @field_validator("layer_budgets", mode="before")
    @classmethod
    def _layer_budgets_are_readable(cls, value: Any) -> Any:
        return parse_layer_budgets(value)

    @field_validator("full_layers", mode="before")
    @classmethod
    def _full_layers_may_be_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return int(value) if COUNT.match(value) else parse_layer_ranges(value)
        return value

    @field_validator("full_layers")
    @classmethod
    def _full_layers_are_layers(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(value, int):
            if value < 0:
                raise ValueError(f"a count of layers cannot be negative, got {value}")
            if value > MAX_LAYERS:
                raise ValueError(f"no model has more than {MAX_LAYERS} layers")
            return value
        layers = tuple(sorted(set(value)))
        if layers and layers[0] < 0:
            raise ValueError(f"layer numbers start at 0, got {layers[0]}")
        if layers and layers[-1] >= MAX_LAYERS:
            raise ValueError(f"no model has a layer beyond {MAX_LAYERS}")
        return layers

    @field_validator("protect_roles", mode="before")
    @classmethod
    def _roles_may_be_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        roles = tuple(part.strip() for part in value.split(","))
        # An empty text is how to say that none is protected; a comma alone is a slip.
        return () if roles == ("",) else roles

    @field_validator("protect_roles")
    @classmethod
    def _roles_are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for role in value:
            if not ROLE.fullmatch(role) or role == "none":
                raise ValueError(f"{role[:40]!r} is no role of a chat, such as 'system'")
        return tuple(dict.fromkeys(value))

    @field_validator("prune")
    @classmethod
    def _prune_is_a_method(cls, value: str) -> str:
        prune = parse_prune(value)
        return NO_PRUNING if prune is None else str(prune)

    @field_validator("pool_size")
    @classmethod
    def _pool_is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(
                f"pooling is centred on a token, so the width must be odd; got {value},"
                f" try {value + 1}"
            )
        return value

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> SieveConfig:
        low, high = self.min_budget, self.max_budget
        reasons = []
        if self.prune != NO_PRUNING and self.layer_budgets != "uniform":
            reasons.append(
                "prune needs the same budget in every layer: leave out layer_budgets, or prune"
            )
        if self.prune != NO_PRUNING and self.full_layers:
            reasons.append(
                "prune needs every layer to be sieved: set full_layers to 0, or leave out prune"
            )
        if low is not None and high is not None and low > high:
            reasons.append(f"min_budget ({low}) is above max_budget ({high})")
        for name, tokens in self._budgets_in_tokens():
            if low is not None and tokens < low:
                reasons.append(f"{name} ({tokens}) is below min_budget ({low})")
            if high is not None and tokens > high:
                reasons.append(f"{name} ({tokens}) is above max_budget ({high})")
        if reasons:
            raise ValueError("; ".join(reasons))
        return self

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> SieveConfig:
        """Validate the settings of `additional_config["kvsieve"]`.

        Raises:
            ConfigError: Every problem found, in words.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(
                [f"the settings must be a JSON object, got {type(settings).__name__}: {settings!r}"]
            )
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise ConfigError(reasons_of(error, settings, list(cls.model_fields))) from None

    @property
    def is_budget_used(self) -> bool:
        """Whether `budget` counts: budgets by layers hold as they are if none was given."""
        return isinstance(self.layer_budgets, str) or "budget" in self.model_fields_set

    def _budgets_in_tokens(self) -> list[tuple[str, int]]:
        """What is given in tokens of `budget` and of the budgets by layers, with its name."""
        named: list[tuple[str, int | str]] = []
        if self.is_budget_used:
            named.append(("budget", self.budget))
        if not isinstance(self.layer_budgets, str):
            named += [(f"layer_budgets {k!r}", v) for k, v in self.layer_budgets.items()]
        return [(name, value) for name, value in named if isinstance(value, int)]

    def budget_rule(self, block_size: int) -> BudgetRule:
        """The budget as a rule over prompt lengths, for the given manager block size.

        Where budgets differ by layer it is the rule of their mean, if `is_budget_used`; which
        layer gets what is said by `core.tiers.make_tiers`.

        Raises:
            ConfigError: A budget can fall below the smallest legal one.
        """
        floor = self.smallest_legal_budget(block_size)
        recent = "observation_window" if self.num_recent_tokens is None else "num_recent_tokens"
        made_of = (
            f"{recent} {self.recent_tokens} + num_sink_tokens {self.num_sink_tokens}"
            f" + one block of {block_size}"
        )
        named = self._budgets_in_tokens()
        for name, bound in (("min_budget", self.min_budget), ("max_budget", self.max_budget)):
            if bound is not None:
                named.append((name, bound))
        reasons = [
            f"{name} {value} is too small: the smallest legal budget is {floor} ({made_of})"
            for name, value in named
            if value < floor
        ]
        if reasons:
            raise ConfigError(reasons)
        return self._rule(self.budget, block_size)

    def layer_rules(self, block_size: int) -> tuple[tuple[tuple[int, ...], BudgetRule], ...]:
        """Layers and rule of each of the budgets by layers; empty if there are none.

        Raises:
            ConfigError: A budget can fall below the smallest legal one.
        """
        self.budget_rule(block_size)
        if isinstance(self.layer_budgets, str):
            return ()
        return tuple(
            (parse_layer_ranges(layers), self._rule(budget, block_size))
            for layers, budget in self.layer_budgets.items()
        )

    @property
    def named_layers(self) -> set[int]:
        """Layers that the budgets by layers name."""
        if isinstance(self.layer_budgets, str):
            return set()
        return {layer for key in self.layer_budgets for layer in parse_layer_ranges(key)}

    def _rule(self, budget: int | str, block_size: int) -> BudgetRule:
        low = self.smallest_request_budget(block_size)
        if isinstance(budget, int):
            return BudgetRule(tokens=budget, min_tokens=low, max_tokens=self.max_budget)
        return BudgetRule(share=parse_share(budget), min_tokens=low, max_tokens=self.max_budget)

    def smallest_legal_budget(self, block_size: int) -> int:
        """The smallest budget that any layer may have, in tokens."""
        return smallest_budget(self.recent_tokens, self.num_sink_tokens, block_size)

    def smallest_request_budget(self, block_size: int) -> int:
        """The smallest budget that a request may have, in tokens."""
        return self.min_budget or self.smallest_legal_budget(block_size)

    @property
    def recent_tokens(self) -> int:
        """Last tokens of the prompt that are always kept."""
        if self.num_recent_tokens is None:
            return self.observation_window
        return self.num_recent_tokens
