"""DeepSpeed's names for what the engine does. What is here exists only because DeepSpeed has something of that name.

No module of it may do the engine's work. This file imports nothing, since the engine still uses single modules.
"""
