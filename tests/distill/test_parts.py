"""The parts of the distillation: data, packing, vocabularies, hidden losses, the teacher cache,
generated batches.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load
from tokenizers.processors import TemplateProcessing
from transformers import (
    BartConfig,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    OPTConfig,
    OPTForCausalLM,
)

import translation.arguments
import zero
from distill import cache, data, on_policy
from distill.alignment import encode_twice
from distill.arguments import parse_arguments
from distill.batch import IGNORED, Batch
from distill.cache import CacheError, Description, TeacherCache, write_cache
from distill.config import DistillationConfig, check
from distill.corpus import train_tokenizer
from distill.data import (
    Collator,
    Segment,
    encode,
    encode_pair,
    pack,
    pair_of,
    segments_of,
)
from distill.export import write_card
from distill.hidden import (
    Attention,
    HiddenMatch,
    hidden_loss,
    layers_and_width,
    parse_layer_mapping,
    relation_heads,
    relation_loss,
)
from distill.importance import block_influence, most_influential
from distill.student import (
    copy_layers,
    cut_config,
    depth,
    from_config,
    generation_config_of,
    parse_best,
    parse_layers,
    stacks,
)
from distill.teacher import LiveTeacher, load_model
from distill.trainer import DistillationTrainer
from distill.vocabulary import VocabularyError, align, align_rows
from tests.distill import models
from tests.processes import run_on
from tests.tolerance import rounding
from translation.model import options_of_model
from translation.records import InputError, open_records

QUESTION = {"role": "user", "content": "q"}
TEXT = ["def add(a, b):\n    return a + b\n", "class Naïve:\n    pass  # größer\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 280)


# -- data


def test_packed_documents_keep_their_tokens_labels_and_positions():
    examples = [
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
        {"input_ids": [8, 9, 10, 11], "labels": [8, 9, 10, 11]},
    ]
    first, second = pack(examples, 5, pad=0)
    assert first == {
        "input_ids": [5, 6, 7, 8, 9],
        "labels": [-100, 6, 7, -100, 9],
        "position_ids": [0, 1, 2, 0, 1],
    }
    assert second["input_ids"] == [10, 11, 0, 0, 0]
    assert second["labels"] == [-100, 11, -100, -100, -100]
    assert second["position_ids"] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    "record, learnt",
    [
        ({"text": "all of it"}, ["all of it"]),
        ({"prompt": "question", "response": "answer"}, ["answer\n"]),
        ({"messages": [QUESTION, {"role": "assistant", "content": "a"}]}, ["a\n"]),
        (
            {"conversations": [{"from": each, "value": each} for each in ("human", "gpt")]},
            ["gpt\n"],
        ),
        (["q", "a", "q2", "a2"], ["a\n", "a2\n"]),
        ([{"user": "q", "assistant": "a"}], ["a\n"]),
    ],
)
def test_only_the_assistants_turns_are_learnt(record, learnt, tokenizer):
    segments = segments_of(record, "here", tokenizer)
    assert [segment.text for segment in segments if segment.learnt] == learnt
    example = encode(segments, tokenizer)
    kept = [token for token in example["labels"] if token != IGNORED]
    # The space after "assistant:" is in the token of the answer's first letter.
    text = tokenizer.decode(kept).replace("\n ", "\n").lstrip(" ")
    assert text == "".join(learnt) + tokenizer.eos_token


@pytest.mark.parametrize("record", [{"title": "x"}, 5, [], {"messages": [QUESTION]}, [["q"]]])
def test_records_of_no_known_kind_are_named(record, tokenizer):
    with pytest.raises(InputError, match="^here"):
        segments_of(record, "here", tokenizer)


def test_what_a_template_says_is_named(tokenizer):
    refusing = copy.deepcopy(tokenizer)
    refusing.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(InputError, match=r"^here.*no system"):
        segments_of(["q", "a"], "here", refusing)


def test_texts_begin_as_the_tokenizer_begins_them(tokenizer):
    starting = copy.deepcopy(tokenizer)
    starting.bos_token = token = tokenizer.eos_token
    starting.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.eos_token_id)]
    )
    plain, example = (encode([Segment("a b", True)], each) for each in (tokenizer, starting))
    assert example["input_ids"] == [starting.bos_token_id, *plain["input_ids"]]
    assert example["labels"] == [IGNORED, *plain["labels"]]
    # A template has written them already.
    assert encode([Segment("a b", True, templated=True)], starting) == plain
    # The two tokenizers' texts begin at different places then.
    twice = encode_twice([Segment("a b", True)], starting, tokenizer, 100)
    assert twice["teacher_positions"] == [0, *range(len(plain["input_ids"]))]


def test_an_alpaca_record_keeps_its_input():
    record = {"instruction": "add", "input": "1 and 2", "output": "3"}
    assert pair_of(record, "here", None, None) == ("add\n1 and 2", "3")
    assert pair_of({**record, "input": ""}, "here", None, None) == ("add", "3")


def test_a_prefix_is_read_before_the_source(tokenizer):
    pair = data.Pair("def add", "class")
    plain, with_prefix = encode_pair(pair, tokenizer, 50), encode_pair(pair, tokenizer, 50, "a: ")
    assert tokenizer.decode(plain["input_ids"]) == "def add"
    assert tokenizer.decode(with_prefix["input_ids"]) == "a: def add"
    assert with_prefix["labels"] == plain["labels"]


def test_targets_of_a_shifted_batch():
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "labels": torch.tensor([[5, 6, 7], [8, 9, -100]]),
    }
    batch = Batch.of(inputs, shifted=True)
    found = [each.tolist() for each in (batch.rows, batch.labels, batch.examples)]
    assert found == [[0, 1, 3], [6, 7, 9], [0, 0, 1]]
    assert Batch.of(inputs, shifted=False).rows.tolist() == [0, 1, 2, 3, 4]


def test_a_token_sees_what_is_before_it_in_its_document():
    documents = [{"input_ids": ids, "labels": ids} for ids in ([5, 6], [7, 8, 9])]
    packed = Batch.of(COLLATE([*pack(documents, 6, pad=0)]), shifted=True)
    expected = torch.block_diag(*(torch.ones(n, n) for n in (2, 3, 1))).tril().bool()
    assert torch.equal(packed.visible()[0], expected)
    padded = Batch.of(COLLATE(documents), shifted=True).visible()[0]
    expected = torch.ones(3, 3).tril().bool()
    expected[2, :2] = True  # a padding token sees itself too, and what comes before
    assert torch.equal(padded, expected)


def test_two_tokenizers_are_aligned_where_the_text_before_is_the_same(tokenizer):
    other = train_tokenizer(["return größer"] * 5, 262)
    example = encode_twice([Segment(TEXT[0], False), Segment(TEXT[1], True)], tokenizer, other, 100)
    theirs = example["teacher_input_ids"]
    aligned = [(i, j) for i, j in enumerate(example["teacher_positions"]) if j >= 0]
    assert len(aligned) > 10
    for i, j in aligned:
        assert tokenizer.decode(example["input_ids"][:i]) == other.decode(theirs[:j])
    assert aligned[-1] == (len(example["input_ids"]) - 1, len(theirs) - 1)  # both end the text


# -- vocabularies


def test_padded_rows_are_no_tokens():
    tokens = {f"t{i}": i for i in range(10)}
    assert align(tokens, tokens, 12, 12) == (None, None, None)
    found = align(tokens, tokens, 12, 16)
    assert found.shared == (slice(0, 10), slice(0, 10)) and found.replacement is None
    assert found.teacher_labels.tolist() == [*range(10), -1, -1]
    with pytest.raises(VocabularyError, match="vocab_policy common"):
        align(tokens, tokens, 12, 16, policy="strict")


def test_tokens_that_only_the_student_knows_are_replaced_for_the_teacher():
    tokens = {f"t{i}": i for i in range(10)}
    found = align(tokens, {name: i for name, i in tokens.items() if i != 4}, 10, 10, replacement=9)
    assert found.shared.student.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert found.replacement == 9 and found.teacher_labels[4] == -1


def test_different_tokenizers_are_refused_with_advice():
    with pytest.raises(VocabularyError, match="id 1 is 'b' and 'c'.*uld"):
        align({"a": 0, "b": 1}, {"a": 0, "c": 1}, 2, 2)


def test_rows_alone_are_compared_where_no_tokenizer_is_known():
    assert align_rows(5, 5) == (None, None, None)
    assert align_rows(5, 3).shared.student == slice(0, 3)


# -- hidden states


def test_hidden_losses_are_those_of_the_formulas():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(hidden_loss(a, b, "mse"), ((a - b) ** 2).sum() / 8)
    cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    torch.testing.assert_close(hidden_loss(a, b, "cosine"), (1 - cosine).sum())


def test_equal_widths_start_from_the_identity():
    match = HiddenMatch(parse_layer_mapping("1:2", 1, 2), 8, 8)
    states = [torch.randn(2, 3, 8) for _ in range(3)]
    rows = torch.tensor([0, 4])
    assert match([states[0], states[2]], states, rows, rows) == 0


def test_generation_settings_are_the_teachers_if_they_can_be_saved(tmp_path):
    teacher = models.llama(16, 2, seed=0)
    teacher.generation_config.update(num_beams=4, eos_token_id=[2, 3])
    assert generation_config_of(teacher).to_dict() == teacher.generation_config.to_dict()
    teacher.generation_config.update(do_sample=False, temperature=0.9, top_p=0.6)
    found = generation_config_of(teacher)
    found.save_pretrained(tmp_path)
    assert found.eos_token_id == [2, 3] and found.temperature != 0.9


def test_decoders_have_their_own_depth_by_any_name():
    sizes = {"encoder_layers": 4, "decoder_layers": 3, "d_model": 16}
    for config in (BartConfig(**sizes), MarianConfig(**sizes)):
        assert depth(config) == layers_and_width(config)[0] == 3
        cut = cut_config(config, {"encoder": [0, 3], "decoder": [0, 2]})
        assert (cut.encoder_layers, cut.decoder_layers) == (2, 2)


def test_a_student_of_all_layers_predicts_what_its_teacher_predicts():
    config = MarianConfig(
        vocab_size=20, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=19,
        eos_token_id=0, decoder_start_token_id=19, max_position_embeddings=32,
    )  # fmt: skip
    teacher = MarianMTModel(config).eval()
    teacher.final_logits_bias.normal_()
    layers = {name: list(range(len(found))) for name, found in stacks(teacher).items()}
    student = from_config(cut_config(config, layers)).eval()
    copy_layers(student, teacher, layers)
    ids = torch.randint(1, 18, (2, 5))
    ours, theirs = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (student, teacher))
    assert torch.equal(ours, theirs)


def test_layers_are_mapped_evenly_or_as_told():
    assert parse_layer_mapping(None, 2, 6) == [(1, 3), (2, 6)]
    assert parse_layer_mapping("0:0, 2:5", 2, 6) == [(0, 0), (2, 5)]
    with pytest.raises(ValueError, match="'3:1' names a layer that does not exist"):
        parse_layer_mapping("3:1", 2, 6)
    with pytest.raises(InputError, match="'7' is not a layer"):
        parse_layers("0,7", 6)


def test_the_influence_of_a_layer_is_the_change_of_its_input_without_padding():
    """Each example alone has no padding, and transformers returns its hidden states itself."""
    model, examples = models.t5(16, 3, seed=0).eval(), models.pairs(6)
    expected: dict[str, list[torch.Tensor]] = {"encoder.block": [], "decoder.block": []}
    with torch.no_grad():
        for example in examples:
            output = model(**COLLATE([example]), output_hidden_states=True)
            for name, changes in expected.items():
                # The last hidden state comes after a norm, and is no layer's output.
                layers = itertools.pairwise(output[f"{name[:7]}_hidden_states"][:-1])
                each = [1 - torch.cosine_similarity(*pair, dim=-1) for pair in layers]
                changes.append(torch.stack(each, dim=-1)[0])
    teacher = LiveTeacher(model, torch.device("cpu"))
    found = block_influence(teacher, [COLLATE(examples[:4]), COLLATE(examples[4:])])
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(expected, 3)
    for name, changes in expected.items():
        assert found[name][:2] == pytest.approx(torch.cat(changes).mean(0).tolist(), rel=1e-4)


def test_the_layers_with_the_greatest_influence_keep_their_order():
    influence = {"encoder": [0.3, 0.1, 0.2], "decoder": [0.1, 0.2, 0.4]}
    assert most_influential(influence, 2) == {"encoder": [0, 2], "decoder": [1, 2]}
    assert parse_best("0,2", 3) is None and parse_best("best:2", 3) == 2
    for text in ("best:0", "best:4", "best:"):
        with pytest.raises(InputError, match="from 1 to 3"):
            parse_best(text, 3)


def test_relations_see_no_hidden_token_and_are_kl():
    generator = torch.Generator().manual_seed(1)
    student, teacher = (
        Attention(*torch.randn(3, 2, 5, width, generator=generator).double()) for width in (8, 16)
    )
    visible = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, -1, -1)
    ours = relation_loss(student, teacher, relation_heads([8, 16], 4), visible)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    for x, y in zip(student, teacher, strict=True):
        for head in range(4):
            a, b = x[..., head * 2 : head * 2 + 2], y[..., head * 4 : head * 4 + 4]
            for row in range(5):
                q, p = (
                    torch.softmax((each[:, row, None] @ each[:, : row + 1].mT)[:, 0] / scale, -1)
                    for each, scale in ((a, math.sqrt(2)), (b, 2.0))
                )
                expected[:, row] += (p * (p / q).log()).sum(-1) / 12
    torch.testing.assert_close(ours, expected)


# -- the cache

COLLATE = Collator(0)
DESCRIPTION = Description("teacher", "1", "tokenizer", 2.0, 4, models.VOCABULARY)


def say(inputs):
    """A teacher whose logits depend on the label and its position."""
    batch = Batch.of(inputs, shifted=True)
    torch.manual_seed(0)
    table = torch.randn(models.VOCABULARY, models.VOCABULARY)
    positions = (batch.rows % inputs["labels"].shape[1]).unsqueeze(1)
    logits = table[batch.labels] + positions / 9 * table[0]
    return batch, lambda rows: logits[rows]


def test_shuffled_and_padded_examples_find_their_own_targets(tmp_path):
    examples = models.sequences(9)
    assert write_cache(tmp_path, DESCRIPTION, examples, COLLATE, say, 2, show_progress=False) == 9
    stored = TeacherCache(tmp_path)
    inputs = COLLATE([examples[i] for i in (7, 2, 5)])
    batch, logits_of = say(inputs)
    bins = cache.top_k_with_tail(cache.log_probabilities(logits_of(slice(None)), 2.0), 4)
    found = stored.targets(inputs, batch)
    assert torch.equal(found.indices.long(), bins.indices)
    torch.testing.assert_close(found.log_p, bins.log_p)
    assert found.log_p.exp().sum(-1).sub(1).abs().max() < 1e-5


def test_an_interrupted_cache_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PART_EXAMPLES", 2)
    examples, asked = models.sequences(9), []

    def interrupted(inputs):
        asked.append(len(inputs["labels"]))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return say(inputs)

    with pytest.raises(KeyboardInterrupt):
        write_cache(tmp_path, DESCRIPTION, examples, COLLATE, interrupted, 2, show_progress=False)
    assert len(TeacherCache(tmp_path)) == 6
    assert write_cache(tmp_path, DESCRIPTION, examples, COLLATE, say, 2, show_progress=False) == 3
    assert len(TeacherCache(tmp_path)) == 9


def test_what_a_cache_cannot_give_is_an_error(tmp_path):
    examples = models.sequences(4)
    write_cache(tmp_path, DESCRIPTION, examples[:3], COLLATE, say, 2, show_progress=False)
    stored = TeacherCache(tmp_path)
    with pytest.raises(CacheError, match="does not hold an example"):
        stored.targets(inputs := COLLATE(examples), Batch.of(inputs, shifted=True))
    keys = [cache.example_keys(COLLATE([each])) for each in examples]
    stored.require(keys[:3])
    with pytest.raises(CacheError, match="does not hold 1 of the examples"):
        stored.require(keys)
    with pytest.raises(CacheError, match="different temperature: 2.0, not 1.0"):
        stored.check(temperature=1.0)
    with pytest.raises(CacheError, match="no cache.json"):
        TeacherCache(tmp_path / "nowhere")


def test_a_cache_that_was_described_alone_is_begun_again(tmp_path):
    """As after a run that was killed, or refused, before it stored anything."""
    other = replace(DESCRIPTION, top_k=7)
    for text in ("{", json.dumps(vars(other))):
        (tmp_path / "cache.json").write_text(text)
        cache._describe(tmp_path, DESCRIPTION)
        assert TeacherCache(tmp_path).description == DESCRIPTION
    write_cache(tmp_path, DESCRIPTION, models.sequences(3), COLLATE, say, 2, show_progress=False)
    with pytest.raises(CacheError, match="different top_k"):
        write_cache(tmp_path, other, models.sequences(3), COLLATE, say, 2, show_progress=False)


def flip_a_probability(part: bytes) -> bytes:
    log_p = load(part)["log_p"].numpy().tobytes()
    return part.replace(log_p, bytes([log_p[0] ^ 1]) + log_p[1:])


def with_entry(**entry: Any) -> Callable[[bytes], bytes]:
    return lambda description: json.dumps(json.loads(description) | entry).encode()


@pytest.mark.parametrize(
    ("pattern", "damage", "named"),
    [
        ("part-*", lambda part: part[:-7], "damaged.*delete this file"),
        ("part-*", flip_a_probability, "damaged.*delete this file"),
        ("part-*", None, "part-"),
        ("cache.json", lambda _: b'{"teacher": "import\xffnce"}', "damaged.*delete"),
        ("cache.json", lambda _: b"[]", "damaged.*delete"),
        ("cache.json", with_entry(sampling="importunce"), "damaged.*delete"),
        ("cache.json", with_entry(top_k=2.5), "damaged.*delete"),
        ("cache.json", with_entry(new=1), "damaged.*delete"),
        ("cache.json", with_entry(tokens=3), "as .*cache.json says"),
        ("cache.json", with_entry(top_k=3), "as .*cache.json says"),
        ("cache.json", None, "cache.json"),
    ],
)
def test_a_damaged_cache_is_named(tmp_path, pattern, damage, named):
    """None: a named pipe in place of the file."""
    examples = models.sequences(3)
    write_cache(tmp_path, DESCRIPTION, examples, COLLATE, say, 2, show_progress=False)
    (path,) = tmp_path.glob(pattern)
    whole = path.read_bytes()
    if damage is None:
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(damage(whole))
    inputs = COLLATE(examples)
    with pytest.raises(CacheError, match=named):
        TeacherCache(tmp_path).targets(inputs, Batch.of(inputs, shifted=True))


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_replaced_teacher_has_another_revision(tmp_path, name):
    content = bytearray(5 * 2**20)
    (tmp_path / "config.json").write_text("{}")
    found = set()
    for changed in (None, 0, len(content) // 2, -1):
        if changed is not None:
            content[changed] ^= 1
        (tmp_path / name).write_bytes(content)
        found.add(cache.teacher_revision(str(tmp_path), None))
    assert len(found) == 4
    assert cache.teacher_revision("hub/name", "commit") == "commit"


def test_a_cache_of_sampled_tokens_takes_100_bytes_a_target(tmp_path):
    description = replace(DESCRIPTION, top_k=12, sampling="importance")
    examples = models.sequences(9)
    write_cache(tmp_path, description, examples, COLLATE, say, 2, show_progress=False)
    inputs = COLLATE(examples)
    batch, _ = say(inputs)
    found = TeacherCache(tmp_path).targets(inputs, batch)
    assert found.log_p.shape == (len(batch.labels), 12)
    torch.testing.assert_close(found.log_p.exp().sum(-1), torch.ones(len(batch.labels)))
    (part,) = tmp_path.glob("part-*.safetensors")
    rows = [load(part.read_bytes())[name] for name in ("indices", "log_p", "cross_entropy")]
    assert sum(row.nbytes for row in rows) == 100 * len(batch.labels)


# -- generated batches


def test_all_ranks_draw_the_same_writer():
    drawn = [on_policy.writer_of(step, 0, seed=3, lmbda=0.3, seq_kd=False) for step in range(500)]
    assert 110 < drawn.count("student") < 190 and drawn.count(None) == 500 - drawn.count("student")
    assert on_policy.writer_of(1, 0, 3, lmbda=0.0, seq_kd=True) == "teacher"


def test_a_batch_is_drawn_from_its_own_random_numbers():
    def drawn(*which: int) -> list[float]:
        with on_policy.drawing(3, *which, torch.device("cpu")):
            return torch.rand(3).tolist()

    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    found = [torch.rand(1), drawn(1, 0, 0), torch.rand(1)]
    assert torch.equal(torch.cat([found[0], found[2]]), expected)
    assert drawn(1, 0, 0) == found[1]
    assert len({tuple(drawn(*which)) for which in itertools.product(range(2), repeat=3)}) == 8


def test_a_written_batch_keeps_prompts_and_learns_answers():
    model = models.llama(16, 2, seed=0)
    answer = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    inputs = COLLATE([answer, {"input_ids": [9, 3], "labels": [9, 3]}])
    batch = on_policy.rewrite(model, inputs, 3, pad_token_id=0, ends=[], by_student=False)
    assert batch["input_ids"][0, :2].tolist() == [5, 6] and batch["input_ids"][1, 0] == 9
    assert batch["attention_mask"].sum(1).tolist() == [5, 4]
    learnt = batch["labels"] != IGNORED
    assert learnt.sum(1).tolist() == [3, 3]
    assert torch.equal(batch["labels"][learnt], batch["input_ids"][learnt])
    greedy = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(torch.tensor([[9]]), attention_mask=torch.ones(1, 1), **greedy)
    assert batch["input_ids"][1, :4].tolist() == alone[0].tolist()


@pytest.mark.parametrize(
    "settings", [{"num_beams": 4}, {"no_repeat_ngram_size": 1}, {"repetition_penalty": 3.0}]
)
def test_models_write_from_their_own_distribution(settings):
    """Whatever their settings for `generate` are."""
    model = models.llama(16, 2, seed=0).eval()
    ids = torch.full((1024, 4), 3)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for by_student in (True, False):
        written = []
        for config in (GenerationConfig(), own := GenerationConfig(eos_token_id=7, **settings)):
            model.generation_config = config
            torch.manual_seed(0)
            written.append(on_policy.rewrite(model, inputs, 3, 0, [], by_student)["input_ids"])
        assert torch.equal(*written) and model.generation_config is own
        if by_student:
            expected = model(ids[:1, :2]).logits[0, -1].softmax(-1)
            share = torch.bincount(written[0][:, 2], minlength=models.VOCABULARY) / len(ids)
            # five standard deviations of the share of a token
            assert (share - expected).abs().max() < 5 * math.sqrt(0.25 / len(ids))


def test_an_answer_ends_where_the_tokenizer_or_the_model_says():
    model = models.llama(16, 2, seed=0)
    model.generation_config.eos_token_id = [7, 9]
    assert on_policy.end_tokens(model, 2) == [2, 7, 9]
    written = torch.tensor([[5, 9, 0, 0], [7, 0, 0, 0], [5, 6, 8, 4]])
    expected = [[5, 9, -100, -100], [7, -100, -100, -100], [5, 6, 8, 4]]
    assert on_policy._until_end(written, [2, 7, 9]).tolist() == expected


def written_by_a_sharded_student(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Ranks write different numbers of tokens, so a gather for each token would not match."""
    plain, model = (models.llama(16, 2, seed=0) for _ in range(2))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    zero.initialize(model=model, config=settings)
    inputs = COLLATE([{"input_ids": [5 + rank, 6], "labels": [5 + rank, 6]}])
    written = []
    for each in (plain, model):
        torch.manual_seed(rank)
        batch = on_policy.rewrite(each, inputs, 3 + 4 * rank, 0, ends=[], by_student=True)
        written.append(batch["input_ids"][0].tolist())
    return written[0], written[1]


def test_a_sharded_student_is_gathered_once_and_writes_what_it_writes_whole():
    for rank, (expected, found) in enumerate(run_on(2, written_by_a_sharded_student)):
        assert len(found) == 1 + 3 + 4 * rank and found == expected


def trainer(tmp_path, student, teacher, examples, **options) -> DistillationTrainer:
    args = DistillationConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=1, logging_steps=1, save_strategy="no", **options,
    )  # fmt: skip
    data = {"train_dataset": examples, "eval_dataset": examples, "data_collator": COLLATE}
    return DistillationTrainer(student, teacher, args, **data)


@pytest.mark.parametrize(
    ("make", "isolates"), [(models.llama, True), (models.gpt2, True), (models.bloom, False)]
)
def test_packed_documents_have_the_losses_that_they_have_alone(make, isolates, tmp_path, caplog):
    """A BLOOM does not read from position_ids where they begin."""
    documents = [{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7, 8], [9, 10, 11])]
    packed, alone = (
        trainer(tmp_path, make(16, 2, seed=0), make(16, 2, seed=1), examples).evaluate()
        for examples in ([*pack(documents, 9, pad=0)], documents)
    )
    assert ("lets packed documents see each other" not in caplog.text) == isolates
    for name in ("eval_loss", "eval_kd_loss", "eval_teacher_ce"):
        assert packed[name] == pytest.approx(alone[name], rel=rounding(torch.float32, 1000))
    assert packed["eval_tokens"] == alone["eval_tokens"] == 5


def test_labels_that_the_teacher_does_not_know_do_not_count_for_it(tmp_path):
    student, known = models.llama(16, 2, seed=0), 30
    teacher = models.llama(16, 2, seed=1, vocabulary=known)
    examples = models.sequences(5)
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor(example["input_ids"])
        with torch.no_grad():
            logits = teacher.eval()(ids.where(ids < known, 0).unsqueeze(0)).logits[0, :-1]
        labels = ids[1:].where(ids[1:] < known, IGNORED)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != IGNORED).sum())
    found = trainer(tmp_path, student, teacher, examples).evaluate()
    assert 0 < count < found["eval_tokens"]
    assert found["eval_teacher_ce"] == pytest.approx(total / count, rel=1e-5)


def test_a_head_that_reads_16_bits_from_a_projection_is_trained_in_16_bits(tmp_path):
    """As that of OPT-350m, whose hidden states are wider than its embeddings."""
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 16, "ffn_dim": 32}
    config = OPTConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=8)
    torch.manual_seed(0)
    student, teacher = OPTForCausalLM(config), models.llama(16, 2, seed=1)
    training = trainer(tmp_path, student, teacher, models.sequences(3), max_steps=2, bf16=True)
    assert math.isfinite(training.train().training_loss)


def test_a_student_that_predicts_nan_has_no_score(tmp_path):
    student = models.llama(16, 2, seed=0)
    with torch.no_grad():
        student.model.norm.weight[0] = torch.nan
    found = trainer(tmp_path, student, models.llama(16, 2, seed=1), models.sequences(3)).evaluate()
    assert math.isnan(found["eval_loss"]) and math.isfinite(found["eval_teacher_ce"])


def test_nan_in_training_is_an_error(tmp_path):
    """Of a token that the first batch does not have."""
    teacher, rare = models.llama(16, 2, seed=1, tied=False), models.VOCABULARY - 1
    with torch.no_grad():
        teacher.model.embed_tokens.weight[rare] = torch.nan
    examples = [{"input_ids": [5, each, 6, 7], "labels": [5, each, 6, 7]} for each in (4, rare)]
    training = trainer(
        tmp_path, models.llama(16, 2, seed=0), teacher, examples,
        train_sampling_strategy="sequential", max_steps=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="kd_loss was NaN since the last log, at step 2"):
        training.train()


def test_a_step_without_targets_changes_nothing(tmp_path):
    student = models.llama(16, 2, seed=0)
    before = copy.deepcopy(student.state_dict())
    examples = [{"input_ids": [5, 6, 7], "labels": [IGNORED] * 3}]
    training = trainer(tmp_path, student, None, examples, kd_alpha=0.0, max_steps=1)
    training.train()
    assert all(torch.equal(value, before[key]) for key, value in student.state_dict().items())


def test_a_teacher_that_predicts_nan_is_named(tmp_path):
    model = models.llama(16, 2, seed=0)
    model.name_or_path = "broken"
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    inputs = COLLATE(models.sequences(2))
    batch = Batch.of(inputs, shifted=True)
    with pytest.raises(InputError, match="teacher broken predicts NaN"):
        LiveTeacher(model, torch.device("cpu")).observe(batch.teacher, batch.rows)

    def say_nan(inputs):
        return batch, lambda rows: torch.full((len(batch.labels), models.VOCABULARY), torch.nan)

    with pytest.raises(CacheError, match="predicts NaN"):
        write_cache(tmp_path, DESCRIPTION, models.sequences(2), COLLATE, say_nan, 2)


# -- arguments


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"temperature": 0.0}, "temperature is 0"),
        ({"kd_alpha": 1.5}, "kd_alpha"),
        ({"loss_type": "uld", "top_k": 5}, "top_k"),
        ({"loss_type": "uld", "lmbda": 0.5}, "lmbda needs one tokenizer"),
        ({"teacher_cache": "x", "lmbda": 0.5}, "lmbda needs a live teacher"),
        ({"teacher_cache": "x", "overlap_teacher": True}, "overlap_teacher needs a live teacher"),
        ({"lmbda": 0.5, "kd_alpha": 0.0}, "lmbda: a student learns nothing"),
        ({"layer_mapping": "1:2"}, "layer_mapping needs hidden_loss_weight"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor has no effect"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        check(DistillationConfig(str(tmp_path), use_cpu=True, report_to="none", **arguments))


def test_a_model_is_loaded_in_the_dtype_of_its_file(tmp_path):
    """transformers 4 loads in float32 unless it is told otherwise."""
    models.llama(16, 1, seed=0).to(torch.float16).save_pretrained(tmp_path)
    for dtype, expected in ((None, torch.float16), ("auto", torch.float16), ("float32", None)):
        found = load_model(str(tmp_path), **options_of_model(None, dtype)).dtype
        assert found == (expected or torch.float32)


def test_the_temperature_follows_its_schedule(tmp_path):
    options = {"use_cpu": True, "report_to": "none", "temperature": 4.0, "final_temperature": 2.0}
    linear, cosine = (
        DistillationConfig(str(tmp_path), temperature_schedule=kind, **options)
        for kind in ("linear", "cosine")
    )
    assert [linear.temperature_at(x) for x in (0, 0.5, 1)] == [4, 3, 2]
    assert cosine.temperature_at(0.5) == pytest.approx(3)
    assert cosine.temperature_at(0.1) > linear.temperature_at(0.1)


def test_texts_are_read(tmp_path):
    """Records of other kinds are in tests/unit/translation."""
    (tmp_path / "c.txt").write_text("four")
    ((_, record),) = open_records(str(tmp_path / "c.txt"), "--train_file")
    assert record == {"text": "four"}
    (tmp_path / "e.jsonl").write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    ((_, record),) = open_records(str(tmp_path / "e.jsonl"), "--train_file")
    assert record == {"text": "a\u2028b"}
    (tmp_path / "texts").mkdir()
    for name in ("b.md", "a.py"):
        (tmp_path / "texts" / name).write_text(name)
    texts = open_records(str(tmp_path / "texts"), "--train_file")
    assert [record["text"] for _, record in texts] == ["a.py", "b.md"]


@pytest.mark.parametrize(
    "line, named",
    [
        ("--teacher_device cudda", "--teacher_device cudda: "),
        ("--lora_target_modules q_proj", "--lora_target_modules needs adapters"),
        ("--merge_adapters", "--merge_adapters needs adapters"),
        ("--tokenizer_name ./none", "--tokenizer_name ./none: no such folder"),
        ("--teacher_model_name_or_path .", "--teacher_model_name_or_path .: there is no config"),
    ],
)
def test_a_command_line_that_cannot_work_is_named(line, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = "--do_train --train_file t.txt --student_config s.json --kd_alpha 0 --output_dir out"
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(InputError, match=named):
        parse_arguments([*job.split(), *line.split()])


@pytest.mark.parametrize(
    "line, steps, teacher_steps",
    [
        ("", 300, 1200),
        ("--max_steps 20", 20, 20),
        ("--max_steps 20 --teacher_steps 40", 20, 40),
        ("--num_train_epochs 3", -1, None),  # the corpus decides
    ],
)
def test_the_steps_of_a_demonstration_bound_its_teacher(
    line, steps, teacher_steps, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    _, data_args, args = parse_arguments(line.split())
    assert (args.max_steps, data_args.teacher_steps) == (steps, teacher_steps)
    assert args.num_train_epochs == (float(line.split()[-1]) if "epochs" in line else 3)


@pytest.mark.parametrize("parse", [parse_arguments, translation.arguments.parse_arguments])
def test_no_file_has_the_access_token(parse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    line = "--push_to_hub --hub_token hf_secret --hub-token=hf_secret --max_steps 3".split()
    monkeypatch.setattr("sys.argv", ["run_distill.py", *line, "--token", "hf_secret"])
    *_, args = parse(line)
    torch.save(args, tmp_path / "training_args.bin")
    own = DistillationConfig("out", use_cpu=True, report_to="none")
    write_card(tmp_path, own, "a teacher", {}, "train.jsonl")
    assert all(b"hf_secret" not in path.read_bytes() for path in tmp_path.iterdir())
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "--hub_token '<TOKEN>' '--hub-token=<TOKEN>' --max_steps 3" in card
    assert huggingface_hub.get_token() == "hf_secret"
