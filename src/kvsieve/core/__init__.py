"""Arithmetic and data: budgets, layer plans, configuration, reports, errors."""
