"""Switches zero on for Hugging Face libraries: call `zero.hf.enable()` before you import them."""

from zero.integrations.hf.hook import STARTUP, enable

__all__ = ["STARTUP", "enable"]
