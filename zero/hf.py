"""For Hugging Face libraries: call `zero.hf.enable()` before you import them to use zero where they
would use DeepSpeed.
"""

from zero.integrations.hf.hook import enable
from zero.integrations.hf.quantized_experts import quantize_experts

__all__ = ["enable", "quantize_experts"]
