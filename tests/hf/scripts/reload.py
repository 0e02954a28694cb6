"""`python reload.py MODEL_FOLDER`: load a saved T5 without zero and print what it generates, and
its dtype, as JSON.
"""

import json
import sys

import torch
from jobs import EVALUATION_SAMPLES, Tokens, collate
from transformers import AutoModelForSeq2SeqLM

model, info = AutoModelForSeq2SeqLM.from_pretrained(
    sys.argv[1], dtype="auto", output_loading_info=True
)
inputs = collate([Tokens(0, seq2seq=True)[index] for index in range(EVALUATION_SAMPLES["t5"])])
inputs.pop("labels")
tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8)
finite = all(torch.isfinite(p).all().item() for p in model.parameters())
print(json.dumps({
    "tokens": tokens.tolist(), "dtype": str(model.dtype), "finite": finite,
    "missing": sorted(info["missing_keys"]),
}))  # fmt: skip
