"""`kvsieve serve`: vLLM's OpenAI server with a sieved KV cache."""

from __future__ import annotations

import typer

from kvsieve.cli import options


def serve(
    context: typer.Context,
    model: str = typer.Argument(help="Model to serve, as `vllm serve` takes it."),
    policy: options.Policy = None,
    budget: options.Budget = None,
    min_budget: options.MinBudget = None,
    max_budget: options.MaxBudget = None,
    mode: options.Mode = None,
    mode_endpoint: options.ModeEndpoint = None,
    forced_tokens: options.ForcedTokens = None,
    full_layers: options.FullLayers = None,
    observation_window: options.ObservationWindow = None,
    pool_size: options.PoolSize = None,
    pooling: options.Pooling = None,
    num_recent_tokens: options.NumRecentTokens = None,
    num_sink_tokens: options.NumSinkTokens = None,
    layer_budgets: options.LayerBudgets = None,
    max_tiers: options.MaxTiers = None,
    policy_options: options.PolicyOptions = None,
    protect_roles: options.ProtectRoles = None,
    prune: options.Prune = None,
    prune_options: options.PruneOptions = None,
    prune_calibration: options.PruneCalibration = None,
) -> None:
    """Serve MODEL over vLLM's OpenAI API with a sieved KV cache.

    Every other option is passed on to `vllm serve` as it is. Listens on loopback
    unless `--host` says otherwise.
    """
    options.check_model(model)
    settings = options.given_settings(context)
    options.check_settings(settings)
    from kvsieve.engine.entrypoint import run_server

    run_server(model, settings, context.args)
