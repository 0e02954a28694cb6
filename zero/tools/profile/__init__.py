"""Runs the user's own script for a few steps, for `zero trace` and `zero verify`.

Nothing here is imported by an ordinary run.
"""
