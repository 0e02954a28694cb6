"""The connection to Hugging Face: zero under the name `deepspeed`, for an unpatched `transformers.Trainer`."""

from zero.hf.hook import enable

__all__ = ["enable"]
