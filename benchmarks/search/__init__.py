"""Offline search for a policy: one full pass per prompt, then many candidates at equal storage."""
