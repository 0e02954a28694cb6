"""Reads and writes the checkpoints of other engines.

Each format has a module that turns a folder into a `TrainingState`, or the other way round.
"""
