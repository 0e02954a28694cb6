"""The connection to Hugging Face: zero under the name `deepspeed`, for an unpatched `transformers.Trainer`."""

from zero.hf.hook import STARTUP, enable

__all__ = ["STARTUP", "enable"]
