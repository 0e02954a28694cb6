"""MiniCodformer: it sees no future tokens and no other documents, generates from its cache, and
loads by Auto classes.

The model is in float64. If shapes differ (a packed batch, a cache), results agree within float64
rounding. A leak from another position would be larger by many orders of magnitude."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from distill.hidden import AttentionRecorder, layers_and_width
from distill.minicodformer import MiniCodformerConfig, MiniCodformerForCausalLM
from tests.tolerance import assert_close, rounding

VOCABULARY = 50
# For logits below 10. The inner lengths of the matrix products add up to less than 1000.
CLOSE = {"rtol": 0.0, "atol": 10 * rounding(torch.float64, 1000)}


@pytest.fixture(scope="module")
def model() -> MiniCodformerForCausalLM:
    torch.manual_seed(0)
    config = MiniCodformerConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return MiniCodformerForCausalLM(config).double().eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def test_no_position_sees_the_future(model):
    """The gradient of each position's logits with respect to later positions' inputs is exactly
    zero.
    """
    inputs = model.embed_tokens(tokens(1, 9)).detach().requires_grad_()
    logits = model(inputs_embeds=inputs).logits
    for position in range(9):
        (gradient,) = torch.autograd.grad(
            logits[0, position].square().sum(), inputs, retain_graph=True
        )
        reached = gradient[0].abs().sum(-1)
        assert (reached[: position + 1] > 0).all()
        assert (reached[position + 1 :] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 3}],
    ids=["greedy", "beams", "sampling", "sampled beams"],
)
def test_generation_by_cache_is_generation_without_it(model, options):
    ids = tokens(3, 7)
    ids[0, :4] = 0  # padding
    lengths = []  # of what the model gets in each step
    texts = []
    hook = model.embed_tokens.register_forward_hook(
        lambda module, args, output: lengths.append(args[0].shape[1])
    )
    with hook:
        for use_cache in (True, False):
            torch.manual_seed(0)
            texts.append(
                model.generate(
                    ids, attention_mask=(ids != 0).long(), max_new_tokens=8, use_cache=use_cache,
                    **{"do_sample": False} | options,
                )
            )  # fmt: skip
    assert torch.equal(*texts)
    if not options:  # padding changes no continuation
        alone = model.generate(ids[:1, 4:], max_new_tokens=8, do_sample=False)
        assert torch.equal(texts[0][:1, 4:], alone)
    assert lengths == [7, *[1] * 7, *range(7, 15)]


def test_an_argument_that_is_not_known_is_an_error(model):
    ids, cache = tokens(1, 3), DynamicCache()
    with pytest.raises(TypeError, match="past_keys"):
        model(ids, past_keys=cache)
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids, past_key_values=cache, cache=cache)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks it
def test_peft_wraps_it(model):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    wrapped = get_peft_model(copy.deepcopy(model), config)
    ids = tokens(2, 5)
    torch.testing.assert_close(wrapped(ids, labels=ids).loss, model(ids, labels=ids).loss)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(wrapped.generate(input_ids=ids, **options), model.generate(ids, **options))


def test_the_cache_is_no_prediction(model):
    """The Trainer takes all outputs of an evaluation for predictions, except those that the
    configuration names.
    """
    output = model(tokens(1, 3), use_cache=True)
    assert set(output) - set(model.config.keys_to_ignore_at_inference) == {"logits"}


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model):
    a, b = tokens(1, 5, seed=2), tokens(1, 7, seed=3)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    packed = model(torch.cat([a, b], dim=1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(
        packed, torch.cat([model(a).logits, model(b).logits], dim=1), **CLOSE
    )


def test_it_saves_and_loads_by_the_auto_classes(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is MiniCodformerConfig
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is MiniCodformerForCausalLM
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    ids = tokens(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.num_hidden_layers == 4


def test_losses_between_layers_count_encoder_and_decoder(model):
    states = model(tokens(1, 4), output_hidden_states=True).hidden_states
    assert layers_and_width(model.config) == (len(states) - 1, 16) == (4, 16)
    assert len(AttentionRecorder(model, "student", [0, 1]).modules) == 2
    with pytest.raises(ValueError, match="only 2 layers of the student have attention, not layer"):
        AttentionRecorder(model, "student", [1, 3])


def test_labels_give_the_shifted_cross_entropy(model):
    ids = tokens(2, 6)
    output = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert_close(output.loss, expected, VOCABULARY + ids.numel())
    per_step = model(ids, labels=ids, num_items_in_batch=torch.tensor(20)).loss
    assert_close(per_step, expected * 10 / 20, VOCABULARY + ids.numel())
