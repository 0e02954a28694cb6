"""Bounded runs of the user's own script: `zero trace` and `zero memory`, and what `zero verify`
shares with them.

Nothing here is imported by an ordinary run.
"""
