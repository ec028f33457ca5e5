"""Families of transformers, built from configuration, small; each computes its own loss.

``driver.py`` runs them like the cases. In float64; Mixtral's experts in products that know float64
("batched_mm"; torch's grouped product does not).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from cases import Note, labels, loader_of, rows, train

FAMILIES: dict[str, Callable[[Note], None]] = {}


def family(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    FAMILIES[fn.__name__] = fn
    return fn


TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}


def without_chance(model: nn.Module) -> nn.Module:
    """Turn dropout off: one process draws other numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name, value in vars(model.config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(model.config, name, 0.0)
    model.config.use_cache = False
    return model


def train_text(note: Note, model: nn.Module, **more: Any) -> None:
    """Train on tokens, some of them no labels; the loss is a mean over those that are."""
    words, wanted = labels(20, 9, classes=99, seed=4), labels(20, 9, classes=99, seed=5)
    words = words.clamp(min=3)
    wanted[2:4] = -100
    wanted[14:, 4:] = -100

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    train(note, without_chance(model).train(), loader_of(words, wanted), loss_of, counts=(4, 5), **more)


def train_images(note: Note, model: nn.Module, **more: Any) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss

    pictures, classes = rows(20, 3, 32, 32), labels(20, classes=5)
    train(note, without_chance(model).train(), loader_of(pictures, classes), loss_of, **{"counts": (4, 5), **more})


@family
def gpt2(note: Note) -> None:
    train_text(
        note,
        hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=32, **SPECIAL)),
    )


@family
def llama(note: Note) -> None:
    train_text(note, hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **SPECIAL, num_key_value_heads=2)))


@family
def t5(note: Note) -> None:
    sizes = {"vocab_size": 99, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    train_text(note, hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)))


@family
def bert(note: Note) -> None:
    train_text(note, hf.BertForMaskedLM(hf.BertConfig(**TEXT)))


@family
def mixtral(note: Note) -> None:
    config = hf.MixtralConfig(
        **TEXT, **SPECIAL, num_key_value_heads=2, head_dim=8, num_local_experts=4, output_router_logits=True
    )
    model = hf.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    train_text(note, model)


@family
def mamba(note: Note) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
    train_text(note, hf.MambaForCausalLM(hf.MambaConfig(**sizes, **SPECIAL)))


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}


@family
def vit(note: Note) -> None:
    train_images(note, hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=5)))


@family
def conv_next(note: Note) -> None:
    config = hf.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], num_labels=5)
    train_images(note, hf.ConvNextForImageClassification(config))


@family
def resnet(note: Note) -> None:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], layer_type="basic", num_labels=5
    )
    train_images(note, hf.ResNetForImageClassification(config), counts=(1,))  # normalises over the microbatch
