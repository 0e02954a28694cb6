"""Translate with a saved checkpoint, with transformers alone: python -m
examples.demonstration.reload FOLDER SENTENCE...
"""

import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

# Set by torchrun. A new process started by a rank must not have them, or it would act as that rank.
LAUNCHER_VARIABLES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()
)


def reload_in_fresh_process(folder: str, sentences: list[str]) -> None:
    """Translate sentences with the checkpoint in `folder`, in a new process with transformers
    alone.

    Raises:
        subprocess.CalledProcessError: the checkpoint does not load.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    command = [
        sys.executable,
        "-m",
        "examples.demonstration.reload",
        os.path.abspath(folder),
        *sentences,
    ]
    sys.stdout.flush()
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True)


def main() -> None:
    folder, *sentences = sys.argv[1:]
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForSeq2SeqLM.from_pretrained(folder),
    )
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    translations = tokenizer.batch_decode(
        model.generate(**batch, max_length=64), skip_special_tokens=True
    )
    print(
        f"reloaded from {folder} ({model.dtype}, {model.num_parameters():,} parameters) in a new "
        "process:"
    )
    for sentence, translation in zip(sentences, translations, strict=True):
        print(f"  {sentence} -> {translation}")


if __name__ == "__main__":
    main()
