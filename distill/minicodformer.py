"""MiniCodformer, a small student for code: a causal Transformer encoder, a linear bridge, and an
LTC-NCP decoder.

[Note: the decoder] Each decoder layer mixes a token with the two before it in a causal convolution
of width 3. Then it moves the state by a gated step, x + tau(c) tanh(c), as closed-form liquid
time-constant cells do (arXiv 2106.13898). The gate is the learnt time constant. A feed-forward
follows. The encoder's attention reaches all earlier tokens, whereas the decoder is local.

[Note: no token sees the future or another document] Attention is causal, and the convolution is
padded on the left only. Taps that would reach before position 0 of a document are zero, so left
padding (in generation) and packing (position_ids that restart at 0) do not change results.

Importing this module registers the model with transformers' Auto classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

WIDTH = 3  # of the convolution


class MiniCodformerConfig(PretrainedConfig):
    """Sizes of a MiniCodformer.

    `num_hidden_layers` counts the layers of encoder and decoder together.
    """

    model_type = "minicodformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 1024,
        hidden_size: int = 64,
        intermediate_size: int = 172,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 512,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-5,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **others: Any,
    ):
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} must be a multiple of num_attention_heads "
                f"{num_attention_heads}"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.num_hidden_layers = encoder_layers + decoder_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.use_cache = use_cache
        others.pop("num_hidden_layers", None)  # it is the sum of the two
        others["tie_word_embeddings"] = tie_word_embeddings
        others.setdefault("pad_token_id", None)  # transformers 5 has no default for it
        super().__init__(**others)


class FeedForward(nn.Module):
    def __init__(self, config: MiniCodformerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    def __init__(self, config: MiniCodformerConfig, layer: int):
        super().__init__()
        self.heads = config.num_attention_heads
        self.layer = layer
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: torch.Tensor, visible: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MiniCodformerEncoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: MiniCodformerConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x: torch.Tensor, visible: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), visible, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class MiniCodformerDecoderLayer(GradientCheckpointingLayer):
    """A causal convolution with a liquid step, and a feed-forward.

    See the first note of this module.
    """

    def __init__(self, config: MiniCodformerConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.mix_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.taps = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size, bias=i == 0) for i in range(WIDTH)
        )
        self.time_constant = nn.Linear(config.hidden_size, config.hidden_size)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor:
        inputs = history = self.mix_norm(x)
        length = x.shape[1]
        if cache is not None:
            # Stored as keys, so that transformers reorders and crops them as it does with
            # attention's keys.
            keys, _ = cache.update(
                inputs.unsqueeze(1), inputs.new_empty(len(x), 1, length, 0), self.layer
            )
            history = keys.squeeze(1)
        before = history.shape[1] - length
        mixed = self.taps[0](inputs)
        for lag in range(1, WIDTH):
            start = before - lag
            shifted = history[:, max(start, 0) : history.shape[1] - lag]
            shifted = nn.functional.pad(shifted, (0, 0, length - shifted.shape[1], 0))
            mixed = mixed + self.taps[lag](shifted * (positions >= lag).unsqueeze(-1))
        x = x + torch.sigmoid(self.time_constant(mixed)) * torch.tanh(mixed)
        return x + self.feed_forward(self.feed_forward_norm(x))


class MiniCodformerForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model: token ids (batch, length) to logits (batch, length, vocabulary), from
    past tokens only.
    """

    config_class = MiniCodformerConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # that is, num_items_in_batch
    _supports_sdpa = True
    _no_split_modules = ["MiniCodformerEncoderLayer", "MiniCodformerDecoderLayer"]
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: MiniCodformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.encoder = nn.ModuleList(
            MiniCodformerEncoderLayer(config, i) for i in range(config.encoder_layers)
        )
        self.bridge = nn.Linear(config.hidden_size, config.hidden_size)
        self.decoder = nn.ModuleList(
            MiniCodformerDecoderLayer(config, config.encoder_layers + i)
            for i in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    # No argument for what is not known: transformers 5.24 gave the cache another name, and one that
    # is overlooked changes what is generated.
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        cache: Cache | None = None,
        cache_position: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the loss if `labels` are given (-100: no target; they are shifted
        here).

        `attention_mask`: (batch, past + length), 0 for padding. `position_ids`: (batch, length),
        counted from the start of each document. Without a cache and a mask, tokens of different
        documents do not see each other. `cache`: `past_key_values` before transformers 5.24, which
        also passed `cache_position`, the positions after what the cache has.
        `num_items_in_batch`: what the loss is divided by, instead of the number of targets."""
        if cache is not None and past_key_values is not None:
            raise ValueError("past_key_values is the cache's earlier name: give one of the two")
        if output_attentions:  # PEFT passes None
            raise ValueError("output_attentions: MiniCodformer returns no weights of its attention")
        cache = past_key_values if cache is None else cache
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        packed = position_ids is not None and attention_mask is None and cache is None
        if position_ids is None:
            position_ids = _positions(x, attention_mask, past)
        visible = _visible(
            x.shape[1], past, attention_mask, position_ids if packed else None, x.device
        )
        x = x + self.embed_positions(position_ids)
        states = [x]
        for layer in self.encoder:
            states.append(layer(states[-1], visible, cache))
        x = self.bridge(states[-1])
        for layer in self.decoder:
            x = layer(x, position_ids, cache)
            states.append(x)
        x = states[-1] = self.norm(x)
        logits = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits, labels, self.config.vocab_size, num_items_in_batch)
        hidden_states = tuple(states) if output_hidden_states else None
        # by position, because the third has the cache's name
        return CausalLMOutputWithPast(loss, logits, cache if use_cache else None, hidden_states)


def _positions(x: torch.Tensor, attention_mask: torch.Tensor | None, past: int) -> torch.Tensor:
    """Return (batch, length) positions, counted from the first token that is not padding."""
    if attention_mask is None:
        return torch.arange(past, past + x.shape[1], device=x.device).expand(len(x), -1)
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]


def _visible(
    length: int,
    past: int,
    mask: torch.Tensor | None,
    packed: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Return (batch or 1, 1, length, past + length) bool: what each token sees.

    None: plain causal attention.
    """
    if mask is None and packed is None and not past:
        return None
    visible = (
        torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past).unsqueeze(0)
    )
    if packed is not None:
        document = (packed == 0).cumsum(-1)
        visible = visible & (document.unsqueeze(1) == document.unsqueeze(2))
    if mask is not None:
        # A padding token sees itself, because a softmax over nothing is NaN.
        itself = torch.eye(past + length, dtype=torch.bool, device=device)[past:]
        visible = visible & (mask[:, None, :].bool() | itself)
    return visible.unsqueeze(1)


AutoConfig.register(MiniCodformerConfig.model_type, MiniCodformerConfig)
AutoModelForCausalLM.register(MiniCodformerConfig, MiniCodformerForCausalLM)
