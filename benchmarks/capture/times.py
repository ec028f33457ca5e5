"""Profiling six models here, and what a roofline of this processor says of the same graphs.

    python benchmarks/capture/times.py            a minute; needs transformers 5

The roofline is taken at 100 % of what a product of 1024 x 1024 matrices and a copy of 64 MB reach, both measured just
before the model; its time over the measured one is the efficiency that would have been right for this model.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from handwritten import Classifier, Residual, UNet, conv
from torch import nn

from nearlinear.core.cluster import Device
from nearlinear.planning.roofline import roofline
from nearlinear.torch.capture import capture
from nearlinear.torch.profile import profile

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, one thread, AdamW, seed 0\n")
    print(
        "| model | operators | step, ms | spread | in no module | backward / forward | roofline / measured: step "
        "| forward | backward | update |"
    )
    print("| --- " * 10 + "|")
    for name, make in CASES.items():
        torch.manual_seed(0)
        model, args, kwargs = make()
        captured = capture(model, args, kwargs)
        here = _device()
        found = profile(model, args, kwargs, optimizer=torch.optim.AdamW(model.parameters()), captured=captured)
        ideal = roofline(captured.graph, here, efficiency=1.0)
        said = [sum(getattr(each, phase) for each in ideal.operators) for phase in ("forward", "backward", "update")]
        shares = [sum(said) / found.step, said[0] / found.forward, said[1] / found.backward, said[2] / found.update]
        cells = [name, str(len(captured.graph.operators)), f"{found.step * 1e3:.0f}", f"{found.spread:.0%}"]
        cells += [f"{found.residue:.0%}", f"{found.backward / found.forward:.2f}", *(f"{each:.2f}" for each in shares)]
        print(f"| {' | '.join(cells)} |", flush=True)


def _device() -> Device:
    a, b = torch.randn(1024, 1024), torch.randn(16_000_000)
    c, d = torch.empty_like(a), torch.empty_like(b)
    product = min(_timed(lambda: torch.mm(a, a, out=c)) for _ in range(8))
    copy = min(_timed(lambda: d.copy_(b)) for _ in range(8))
    return Device("cpu", 8e9, {"float32": 2 * 1024**3 / product}, 2 * 64e6 / copy)


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 2000, (4, 128))
    return {"input_ids": tokens, "labels": tokens}


def _llama() -> Case:
    config = hf.LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=688,
    )
    return hf.LlamaForCausalLM(config), (), _tokens()


def _gpt2() -> Case:
    config = hf.GPT2Config(
        vocab_size=2000, n_embd=256, n_layer=4, n_head=8, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config), (), _tokens()


def _resnet() -> Case:
    widths = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]
    trunk = nn.Sequential(conv(3, 32), *(Residual(*each) for each in widths))
    return Classifier(trunk, 128), (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), {}


def _mlp() -> Case:
    layers = [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers), (torch.randn(512, 1024),), {}


def _unet() -> Case:
    return UNet(32), (torch.randn(4, 3, 64, 64), torch.randint(2, (4, 64, 64))), {}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 256, 2, batch_first=True), nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


CASES: dict[str, Callable[[], Case]] = {
    "MLP 1024, batch 512": _mlp,
    "ResNet, batch 16": _resnet,
    "U-Net 64 x 64, batch 4": _unet,
    "LSTM 256, 16 x 64": lambda: (_Recurrent(), (torch.randn(16, 64, 128),), {}),
    "GPT-2, 4 x 128": _gpt2,
    "Llama, 4 x 128": _llama,
}

if __name__ == "__main__":
    main()
