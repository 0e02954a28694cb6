"""Older and newer releases of Python, torch, transformers and accelerate."""
