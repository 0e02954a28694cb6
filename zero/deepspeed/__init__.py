"""DeepSpeed's names for what the engine does. What is here exists only because DeepSpeed has something of that name.

It lies on top of the engine, which knows nothing of it. No module here does the engine's work.
"""
