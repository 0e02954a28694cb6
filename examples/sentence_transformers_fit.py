r"""sentence-transformers' trainer: train, evaluate, save, resume.

    torchrun --nproc_per_node 2 -m zero run examples/sentence_transformers_fit.py \
        --output_dir output/sentences --deepspeed configs/ds_config_zero3.json

A small BERT learns that "seven pears" and "7 pears" mean the same. It needs no network.
"""
# sentence-transformers is no requirement of this repository, so a type checker may not find it.
# pyright: reportMissingImports=false

import itertools
import tempfile

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, HfArgumentParser, PreTrainedTokenizerFast, set_seed

NUMBERS = "one two three four five six seven eight nine".split()
FRUITS = "apples pears plums cherries figs grapes lemons melons".split()


def build() -> SentenceTransformer:
    """Build a BERT of two layers with a tokenizer for the words above."""
    words = ["[PAD]", "[UNK]", *NUMBERS, *map(str, range(1, 10)), *FRUITS]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    with tempfile.TemporaryDirectory() as folder:  # the library loads a model from a folder
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
        ).save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        transformer = Transformer(folder, max_seq_length=16)
        return SentenceTransformer(modules=[transformer, Pooling(64)], device="cpu")


def main() -> None:
    set_seed(0)
    model = build()
    (args,) = HfArgumentParser(SentenceTransformerTrainingArguments).parse_args_into_dataclasses()
    pairs = [
        {"anchor": f"{word} {fruit}", "positive": f"{number} {fruit}"}
        for fruit, (number, word) in itertools.product(FRUITS, enumerate(NUMBERS, start=1))
    ]
    data = Dataset.from_list(pairs).train_test_split(8, seed=0)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
