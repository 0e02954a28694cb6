"""For Hugging Face libraries: `zero.hf.enable()`, and what an unpatched `transformers.Trainer`
needs to resume.
"""

from pathlib import Path

# A folder for PYTHONPATH: every process that looks for DeepSpeed then calls `hook.set_up`.
STARTUP = str(Path(__file__).parent / "startup")
