"""Parts of `soak.py`: what is sent, what is watched, and what is made of it."""
