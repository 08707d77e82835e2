"""The table of policies: from a name to a method, and from settings to a configuration."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.policies.adakv import ADAKV
from kvsieve.policies.chunkkv import CHUNKKV
from kvsieve.policies.criticalkv import CRITICALKV
from kvsieve.policies.expected_attention import EXPECTED_ATTENTION
from kvsieve.policies.h2o import H2O
from kvsieve.policies.headkv import HEADKV
from kvsieve.policies.keydiff import KEYDIFF
from kvsieve.policies.keyformer import KEYFORMER
from kvsieve.policies.knorm import KNORM
from kvsieve.policies.kv_compress import KV_COMPRESS
from kvsieve.policies.kvsieve import KVSIEVE
from kvsieve.policies.kvsieve_agnostic import KVSIEVE_AGNOSTIC
from kvsieve.policies.layerwise import LAYERWISE
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy
from kvsieve.policies.pyramidkv import PYRAMIDKV
from kvsieve.policies.random_baseline import RANDOM
from kvsieve.policies.rkv import RKV
from kvsieve.policies.snapkv import SNAPKV
from kvsieve.policies.streaming_llm import STREAMING_LLM
from kvsieve.policies.tova import TOVA

ENTRY_POINT_GROUP = "kvsieve.policies"
"""Packages register a `Method` of their own under this group (docs/policies.md)."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        KVSIEVE,
        KVSIEVE_AGNOSTIC,
        SNAPKV,
        PYRAMIDKV,
        LAYERWISE,
        KV_COMPRESS,
        ADAKV,
        HEADKV,
        CRITICALKV,
        CHUNKKV,
        RKV,
        TOVA,
        H2O,
        KEYFORMER,
        EXPECTED_ATTENTION,
        KEYDIFF,
        KNORM,
        STREAMING_LLM,
        RANDOM,
    )
}
"""The methods that come with kvsieve."""


def method_names() -> list[str]:
    """Names of all methods, our own first."""
    return [*METHODS, *sorted({entry.name for entry in _entry_points()} - METHODS.keys())]


def find_method(name: Any) -> Method:
    """The method of a name.

    Raises:
        ConfigError: There is none, or a package's entry point cannot be used.
    """
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    if entry := _entry_of(name):
        return _load(entry)
    names = method_names()
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"policies: {', '.join(names)}"
    raise ConfigError([f"policy: there is no policy {name!r}; {hint}"])


def parse_settings(settings: Mapping[str, Any]) -> SieveConfig:
    """A configuration from the settings that a user gave, with the method's own defaults.

    Raises:
        ConfigError: Every problem found, in words.
    """
    if not isinstance(settings, Mapping):
        return SieveConfig.parse(settings)
    method = find_method(settings.get("policy", SieveConfig.model_fields["policy"].default))
    merged = {**method.defaults, **settings}
    given = settings.get("policy_options", {})
    if isinstance(given, Mapping):
        merged["policy_options"] = {**method.options, **given}
        if unknown := sorted(map(str, given.keys() - method.options.keys())):
            known = ", ".join(method.options) or "none"
            raise ConfigError(
                [
                    f"policy_options: {method.name} has no option {', '.join(map(repr, unknown))};"
                    f" its options: {known}"
                ]
            )
    config = SieveConfig.parse(merged)
    policy_from_config(config)
    return config


def policy_from_config(config: SieveConfig) -> Policy:
    """The policy that the configuration names, with the configuration's parameters.

    Raises:
        ConfigError: There is no such policy, or it cannot be built from these settings.
    """
    method = find_method(config.policy)
    try:
        policy = method.build(config)
    except ConfigError:
        raise
    except ValueError as error:
        says = "" if method.name in METHODS else f" (says {_described(method.name)})"
        raise ConfigError([f"policy_options: {error}{says}"]) from error
    except Exception as error:
        raise ConfigError(
            [f"policy: {_described(method.name)} cannot be built: {type(error).__name__}: {error}"]
        ) from error
    if not isinstance(policy, Policy):
        raise ConfigError(
            [
                f"policy: {_described(method.name)} cannot be built: its build must return a"
                f" kvsieve.policies.Policy, and returned a {type(policy).__name__}"
            ]
        )
    return policy


def _entry_points() -> Any:
    return entry_points(group=ENTRY_POINT_GROUP)


def _entry_of(name: Any) -> Any:
    """The entry point of a name, in the first package that has one; None if none has."""
    return next((entry for entry in _entry_points() if entry.name == name), None)


def _described(name: str) -> str:
    """A method for a reader, with the package that it comes from if it is none of ours."""
    entry = None if name in METHODS else _entry_of(name)
    if entry is None:
        return repr(name)
    package = "an unknown package" if entry.dist is None else f"the package {entry.dist.name}"
    return f"{name!r} of {package} ({entry.value})"


def _load(entry: Any) -> Method:
    described = _described(entry.name)
    try:
        method = entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            [f"policy: {described} cannot be loaded: {type(error).__name__}: {error}"]
        ) from error
    if not isinstance(method, Method) or method.name != entry.name:
        raise ConfigError([f"policy: {described} must name a kvsieve.policies.Method of that name"])
    _check_values(method, described)
    return method


def _check_values(method: Method, described: str) -> None:
    """Refuse a method whose own values no user could have given.

    Raises:
        ConfigError: Its defaults are no settings, or something of it is no JSON.
    """
    fault = f"policy: {described} cannot be used, whatever your settings are"
    try:
        own = {**method.defaults, "policy": method.name, "policy_options": dict(method.options)}
        SieveConfig.parse(own)
    except ConfigError as error:
        reasons = "; ".join(error.reasons)
        raise ConfigError([f"{fault}: its defaults are wrong: {reasons}"]) from error
    except Exception as error:
        raise ConfigError([f"{fault}: its defaults or options are wrong: {error}"]) from error
    try:
        json.dumps([method.summary, method.source, method.sees_question, own], allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError([f"{fault}: all that it says must be JSON: {error}"]) from error
