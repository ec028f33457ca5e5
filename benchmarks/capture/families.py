"""Families of transformers, small: a model with random weights, and a batch of four for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
NORMAL = {"bos_token_id": 1, "eos_token_id": 2}


def _tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 99, (4, 16))
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def _causal(name: str, **fields: Any) -> Case:
    config = getattr(hf, f"{name}Config")(**fields, **NORMAL)
    return getattr(hf, f"{name}ForCausalLM")(config), (), _tokens()


def _masked(name: str, **fields: Any) -> Case:
    mask = torch.ones(4, 16, dtype=torch.long)
    model = getattr(hf, f"{name}ForMaskedLM")(getattr(hf, f"{name}Config")(**fields))
    return model, (), _tokens(attention_mask=mask)


def _images(name: str, size: int = 32, **fields: Any) -> Case:
    config = getattr(hf, f"{name}Config")(**fields, num_labels=5)
    images = {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(5, (4,))}
    return getattr(hf, f"{name}ForImageClassification")(config), (), images


def _gpt2() -> Case:
    config = hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, **NORMAL)
    return hf.GPT2LMHeadModel(config), (), _tokens()


def _gpt_neo() -> Case:
    return _causal(
        "GPTNeo",
        vocab_size=99,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    )


def _bloom() -> Case:
    return _causal("Bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)


def _opt() -> Case:
    fields = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    return _causal("OPT", **fields, ffn_dim=64, word_embed_proj_dim=32)


def _falcon() -> Case:
    return _causal("Falcon", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)


def _mamba() -> Case:
    return _causal("Mamba", vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4)


def _t5() -> Case:
    config = hf.T5Config(
        vocab_size=99, d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), (), _tokens()


def _bart() -> Case:
    halves = {f"{half}_{what}": number for half in ("encoder", "decoder") for what, number in _HALF.items()}
    config = hf.BartConfig(vocab_size=99, d_model=32, max_position_embeddings=64, **halves)
    return hf.BartForConditionalGeneration(config), (), _tokens()


_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def _whisper() -> Case:
    halves = {f"{half}_{what}": number for half in ("encoder", "decoder") for what, number in _HALF.items()}
    config = hf.WhisperConfig(
        vocab_size=99,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **halves,
    )
    batch = {"input_features": torch.randn(4, 8, 32), "labels": torch.randint(3, 99, (4, 12))}
    return hf.WhisperForConditionalGeneration(config), (), batch


def _wav2vec2() -> Case:
    config = hf.Wav2Vec2Config(
        **{**TEXT, "vocab_size": 32},
        conv_dim=(16, 16),
        conv_kernel=(8, 4),
        conv_stride=(4, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
    )
    return hf.Wav2Vec2ForCTC(config), (), {"input_values": torch.randn(4, 400)}


def _clip() -> Case:
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.CLIPConfig(
        text_config={**part, "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**part, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    batch = {
        "input_ids": torch.randint(3, 99, (4, 16)),
        "pixel_values": torch.randn(4, 3, 32, 32),
        "return_loss": True,
    }
    return hf.CLIPModel(config), (), batch


_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}

FAMILIES: dict[str, Callable[[], Case]] = {
    "GPT-2": _gpt2,
    "GPT-Neo": _gpt_neo,
    "GPT-NeoX": lambda: _causal("GPTNeoX", **TEXT),
    "OPT": _opt,
    "Bloom": _bloom,
    "Falcon": _falcon,
    "Llama": lambda: _causal("Llama", **{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "Mistral": lambda: _causal("Mistral", **GROUPED),
    "Mixtral": lambda: _causal("Mixtral", **GROUPED, num_local_experts=4, output_router_logits=True),
    "Qwen3": lambda: _causal("Qwen3", **GROUPED),
    "Gemma 2": lambda: _causal("Gemma2", **GROUPED),
    "Phi-3": lambda: _causal("Phi3", **{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "Mamba": _mamba,
    "BERT": lambda: _masked("Bert", **TEXT),
    "RoBERTa": lambda: _masked("Roberta", **TEXT),
    "DistilBERT": lambda: _masked("DistilBert", vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "ALBERT": lambda: _masked("Albert", **TEXT, embedding_size=16),
    "DeBERTa v2": lambda: _masked("DebertaV2", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "T5": _t5,
    "BART": _bart,
    "Whisper": _whisper,
    "wav2vec 2.0": _wav2vec2,
    "ViT": lambda: _images("ViT", **_VISION),
    "Swin": lambda: _images(
        "Swin", image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    "ConvNeXt": lambda: _images("ConvNext", depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32]),
    "CLIP": _clip,
}
