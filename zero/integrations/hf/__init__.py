"""For Hugging Face libraries:

`zero.hf.enable()`, and what an unpatched `transformers.Trainer` needs to resume.
"""

from zero.integrations.hf.hook import STARTUP, enable

__all__ = ["STARTUP", "enable"]
