"""The model and its tokenizer, which are loaded, or created from scratch for the given text."""

import itertools
import logging
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    T5Config,
    TrainingArguments,
)

from translation.arguments import (
    Arguments,
    is_from_scratch,
    uses_built_in_corpus,
)
from translation.options import DataTrainingArguments, LoadingArguments, ModelArguments
from translation.records import InputError, required
from translation.tokenizer import (
    pad_token_id,
    scored_pieces,
    t5_tokenizer,
    token_id,
    train_sentencepiece,
)

logger = logging.getLogger(__name__)


class ScratchSize(NamedTuple):
    """The size of a new model and its vocabulary."""

    vocab_size: int
    character_coverage: float
    d_model: int
    num_layers: int


BUILT_IN_CORPUS_SIZE = ScratchSize(
    vocab_size=2000, character_coverage=1.0, d_model=128, num_layers=2
)
FREE_TEXT_SIZE = ScratchSize(vocab_size=8000, character_coverage=0.9998, d_model=256, num_layers=3)


def load_model_and_tokenizer(
    texts: dict[str, Dataset], arguments: Arguments
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the named model and tokenizer. Default: a small T5, and a tokenizer trained on
    `texts["train"]`.

    With ZeRO-3, transformers builds the model inside `zero.Init`.

    Raises:
        InputError: a model or tokenizer does not load, or cannot translate.
    """
    model_args, data_args, training_args = arguments
    size = BUILT_IN_CORPUS_SIZE if uses_built_in_corpus(data_args) else FREE_TEXT_SIZE
    name = model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name
    if name:
        tokenizer = _load_tokenizer(name, model_args, data_args)
    else:
        tokenizer = _make_tokenizer(texts["train"], size, training_args)
    if is_from_scratch(model_args):
        model = AutoModelForSeq2SeqLM.from_config(small_t5_config(tokenizer, size))
        logger.info(
            "no model was named: making a small T5 from scratch, %s parameters, vocabulary of %s",
            f"{model.num_parameters():,}",
            f"{len(tokenizer):,}",
        )
    else:
        model = _load_model(model_args, training_args)
    _fit(model, tokenizer, data_args)
    return model, tokenizer


def _load_tokenizer(
    name: str, model_args: ModelArguments, data_args: DataTrainingArguments
) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **model_args.of_hub())
    except (OSError, ValueError) as error:
        raise InputError(
            f"no tokenizer could be loaded from {name} ({error}); name one with --tokenizer_name"
        ) from error
    if hasattr(tokenizer, "src_lang"):
        tokenizer.src_lang = data_args.source_lang
        tokenizer.tgt_lang = data_args.target_lang
    return tokenizer


def _make_tokenizer(
    text: Dataset, size: ScratchSize, training_args: Seq2SeqTrainingArguments
) -> PreTrainedTokenizerBase:
    """Train a SentencePiece vocabulary on rank 0. All ranks create the same tokenizer from it."""
    pieces: list[tuple[str, float]] | str = ""
    if training_args.process_index == 0:
        sentences = itertools.chain.from_iterable(zip(text["source"], text["target"], strict=True))
        try:
            pieces = scored_pieces(
                train_sentencepiece(sentences, size.vocab_size, size.character_coverage)
            )
        except RuntimeError as error:
            pieces = str(error)
    pieces = broadcast_object_list([pieces])[0]
    if isinstance(pieces, str):
        raise InputError(
            f"a vocabulary of {size.vocab_size} pieces cannot be made from the training texts "
            f"({pieces}); name a tokenizer with --tokenizer_name"
        )
    return t5_tokenizer(pieces)


def small_t5_config(tokenizer: PreTrainedTokenizerBase, size: ScratchSize) -> T5Config:
    """Configure a T5 of `size.num_layers` encoder and decoder blocks, heads of 32, gated GELU, and
    no dropout.
    """
    start: dict[str, Any] = {"decoder_start_token_id": pad_token_id(tokenizer)}
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=size.d_model,
        d_kv=32,
        num_heads=size.d_model // 32,
        d_ff=2 * size.d_model,
        num_layers=size.num_layers,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=pad_token_id(tokenizer),
        eos_token_id=token_id(tokenizer, "eos"),
        **start,
    )


def of_model(args: LoadingArguments, training_args: TrainingArguments) -> dict[str, Any]:
    """Return the options with which transformers makes a model, whether or not it is loaded.

    Only an engine keeps weights in fp32 beside those of a model in 16 bits, which are too coarse
    for small updates. So without one, a model that is trained is in fp32 by default.
    """
    is_plain = training_args.do_train and not training_args.deepspeed
    return options_of_model(args.attn_implementation, args.dtype or ("float32" * is_plain))


def options_of_model(attn_implementation: str | None, dtype: str | None) -> dict[str, str]:
    """Return those that are given. Otherwise transformers takes the attention that is fastest, and
    the dtype of the file or configuration.
    """
    given = {"attn_implementation": attn_implementation, "dtype": dtype}
    return {name: value for name, value in given.items() if value and value != "auto"}


def _load_model(model_args: ModelArguments, args: Seq2SeqTrainingArguments) -> PreTrainedModel:
    """Load the named model with its weights; if only a configuration is named, create a new one."""
    name = required(model_args.model_name_or_path or model_args.config_name, "model_name_or_path")
    try:
        hub, options = model_args.of_hub(), of_model(model_args, args)
        config = AutoConfig.from_pretrained(model_args.config_name or name, **hub)
        if model_args.model_name_or_path:
            given = {"dtype": "auto", **hub, **options}  # transformers 4 would load in float32
            return AutoModelForSeq2SeqLM.from_pretrained(name, config=config, **given)
        options |= {"trust_remote_code": model_args.trust_remote_code}
        return AutoModelForSeq2SeqLM.from_config(config, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"no sequence-to-sequence model could be loaded from {name}: {error}"
        ) from error


def _fit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> None:
    """Set the model's vocabulary size and the first token of a translation."""
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    if model.config.decoder_start_token_id is None:
        raise InputError(
            "decoder_start_token_id is not set in the model's config.json: set it (T5: the padding "
            "token)"
        )
    if token := data_args.forced_bos_token:
        index = tokenizer.convert_tokens_to_ids(token)
        if index in (None, tokenizer.unk_token_id):
            raise InputError(
                f"--forced_bos_token {token!r} is not in the tokenizer's vocabulary: name one of "
                "its tokens"
            )
        model.generation_config.forced_bos_token_id = index
