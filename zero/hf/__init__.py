"""The entrance for users of Hugging Face: `zero.hf.enable()`, and what helps an unpatched `transformers.Trainer`."""

from zero.hf.hook import STARTUP, enable

__all__ = ["STARTUP", "enable"]
