"""The one configuration model, validated before anything is loaded."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
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

CONFIG_KEY = "kvsieve"
"""The key of `additional_config` under which vLLM carries our settings."""

MAX_LAYERS = 10_000
"""No model has more; a range beyond it is a slip of the finger."""

MAX_BUDGET = 10**9
"""No prompt has more tokens. Numbers beyond 64 bits could not even be sent between processes."""

_PERCENT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*$")
_RANGE = re.compile(r"^([0-9]{1,9})(?:-([0-9]{1,9}))?$")
_COUNT = re.compile(r"^\s*([0-9]{1,12})\s*$")


def parse_share(text: str) -> float:
    """A share such as `"10%"` as a number in (0, 1].

    Raises:
        ValueError: The text is no percentage, or outside (0%, 100%].
    """
    match = _PERCENT.match(text)
    if not match:
        raise ValueError(f"{text!r} is neither a number of tokens nor a share such as '10%'")
    share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise ValueError(f"a share must be above 0% and at most 100%, got {text!r}")
    return share


def parse_layer_ranges(text: str) -> tuple[int, ...]:
    """Layer numbers of a text such as `"0-2,15"`, ascending and unique.

    Raises:
        ValueError: A part of the text is neither a number nor an ascending range.
    """
    layers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = _RANGE.match(part)
        if not match:
            raise ValueError(
                f"{part!r} in {text!r} is neither a layer number nor a range like '0-2'"
            )
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        if last >= MAX_LAYERS:
            raise ValueError(f"{part!r} names a layer beyond {MAX_LAYERS}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def layer_list(layers: Sequence[int]) -> str:
    """Ascending layer numbers for a reader: `(0, 1, 2, 5)` as `0-2, 5`, no layer as `none`."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges) or "none"


class SieveConfig(BaseModel):
    """Settings of the sieve. Every field is a key of `additional_config["kvsieve"]`.

    Unknown keys are errors and name the nearest known one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["snapkv", "streaming_llm", "random"] = Field(
        default="snapkv",
        description="How the tokens of the prompt are scored (the published method's name; 'random'"
        " is a baseline to compare with).",
    )
    budget: int | str = Field(
        default=1024,
        description="What a sieved layer keeps of a prompt, in tokens per KV head, or as a share"
        " of the prompt such as '10%'.",
    )
    min_budget: Annotated[int, Field(gt=0, le=MAX_BUDGET)] | None = Field(
        default=None,
        description="The operator's lower bound on the budget, in tokens. Default: the smallest"
        " legal budget (window, sinks and one block).",
    )
    max_budget: Annotated[int, Field(gt=0, le=MAX_BUDGET)] | None = Field(
        default=None,
        description="The operator's upper bound on the budget, in tokens. Default: none.",
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
    full_layers: int | tuple[int, ...] | None = Field(
        default=None,
        description="Layers that keep the full cache: a count of leading layers, a list, or ranges"
        " such as '0-2,15'. Default: about a tenth, a count that divides the layers.",
    )
    observation_window: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=32,
        description="Last queries of the prompt that score it, in tokens; always kept.",
    )
    pool_size: Annotated[int, Field(ge=1, le=511)] = Field(
        default=7,
        description="Width of the pooling over neighbouring scores, in tokens; odd.",
    )
    pooling: Literal["max", "avg"] = Field(
        default="max",
        description="Kind of pooling: 'max' as in SnapKV's LongBench runs, 'avg' as in its class"
        " default.",
    )
    num_sink_tokens: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=4,
        description="First tokens of the prompt that are always kept.",
    )

    @field_validator("budget", "min_budget", "max_budget", "full_layers", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        # bool is an int to pydantic: `"budget": true` would mean one token.
        if isinstance(value, bool):
            raise ValueError(f"expected a number or a text, got {value}")
        return value

    @field_validator("budget")
    @classmethod
    def _budget_is_positive(cls, value: int | str) -> int | str:
        if isinstance(value, str):
            if _COUNT.match(value):
                value = int(value)
            else:
                parse_share(value)
                return value.replace(" ", "")
        if value <= 0:
            raise ValueError(f"a budget must be at least 1 token, got {value}")
        if value > MAX_BUDGET:
            raise ValueError(f"a budget must be at most {MAX_BUDGET} tokens")
        return value

    @field_validator("full_layers", mode="before")
    @classmethod
    def _full_layers_may_be_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return int(value) if _COUNT.match(value) else parse_layer_ranges(value)
        return value

    @field_validator("full_layers")
    @classmethod
    def _full_layers_are_layers(
        cls, value: int | tuple[int, ...] | None
    ) -> int | tuple[int, ...] | None:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"a count of layers cannot be negative, got {value}")
        if isinstance(value, tuple):
            if any(layer < 0 for layer in value):
                raise ValueError(f"layer numbers start at 0, got {sorted(value)[0]}")
            return tuple(sorted(set(value)))
        return value

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
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_budget ({low}) is above max_budget ({high})")
        if isinstance(self.budget, int):
            if low is not None and self.budget < low:
                raise ValueError(f"budget ({self.budget}) is below min_budget ({low})")
            if high is not None and self.budget > high:
                raise ValueError(f"budget ({self.budget}) is above max_budget ({high})")
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
            raise ConfigError(_reasons(error, settings)) from None

    def budget_rule(self, block_size: int) -> BudgetRule:
        """The budget as a rule over prompt lengths, for the given manager block size.

        Raises:
            ConfigError: The budget can fall below the smallest legal one.
        """
        floor = smallest_budget(self.observation_window, self.num_sink_tokens, block_size)
        made_of = (
            f"observation_window {self.observation_window} + num_sink_tokens {self.num_sink_tokens}"
            f" + one block of {block_size}"
        )
        reasons = [
            f"{name} {value} is too small: the smallest legal budget is {floor} ({made_of})"
            for name, value in (
                ("budget", self.budget),
                ("min_budget", self.min_budget),
                ("max_budget", self.max_budget),
            )
            if isinstance(value, int) and value < floor
        ]
        if reasons:
            raise ConfigError(reasons)
        low = self.smallest_request_budget(block_size)
        if isinstance(self.budget, int):
            return BudgetRule(tokens=self.budget, min_tokens=low, max_tokens=self.max_budget)
        return BudgetRule(
            share=parse_share(self.budget), min_tokens=low, max_tokens=self.max_budget
        )

    def smallest_request_budget(self, block_size: int) -> int:
        """The smallest budget that a request may have, in tokens."""
        return self.min_budget or smallest_budget(
            self.observation_window, self.num_sink_tokens, block_size
        )


def _reasons(error: ValidationError, settings: Mapping[str, Any]) -> list[str]:
    """Pydantic's findings as sentences that say what to do."""
    known = list(SieveConfig.model_fields)
    by_field: dict[str, list[str]] = {}
    for finding in error.errors():
        name = str(finding["loc"][0]) if finding["loc"] else ""
        if finding["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
            by_field.setdefault(name, []).append(f"unknown setting {name!r}; {hint}")
        else:
            message = finding["msg"].removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            by_field.setdefault(name, []).append(message)
    reasons = []
    for name, messages in by_field.items():
        if name in known:
            # A union reports once for each branch; one sentence is enough.
            what = " or ".join(dict.fromkeys(messages))
            given = textwrap.shorten(repr(settings[name]), 80, placeholder="...")
            reasons.append(f"{name}: {textwrap.shorten(what, 300)} (given: {given})")
        else:
            reasons.extend(messages)
    return reasons
