"""For Hugging Face libraries: `zero.hf.enable()`, and what an unpatched `transformers.Trainer`
needs to resume.
"""
