"""Translate with a saved checkpoint, with transformers alone: python -m translation.reload FOLDER
SENTENCE...
"""

import sys

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


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
