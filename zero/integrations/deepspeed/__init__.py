"""DeepSpeed's names for what the engine does. Everything here exists only because DeepSpeed has
this name.

It is built on the engine, which knows nothing about it. No module here does the engine's work.
"""
