"""Servers as child processes, and what is read from them."""
