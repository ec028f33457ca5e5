"""Models as people write them: convolutional networks, U-Net, recurrent networks, transformers, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def conv(inside: int, outside: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU."""
    layer = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A bottleneck block, whose one ReLU is called three times."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.skip(x))


class Classifier(nn.Module):
    """A trunk, a mean over the picture, a linear layer, cross entropy."""

    def __init__(self, trunk: nn.Module, width: int, classes: int = 10) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.head(self.trunk(images).mean((2, 3))), labels)


def pictures(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four pictures and their labels."""
    return torch.randn(4, 3, size, size), torch.randint(10, (4,))


def resnet() -> Case:
    """Return a ResNet-18 in small."""
    widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
    return Classifier(nn.Sequential(conv(3, 8), *(Residual(*each) for each in widths)), 32), pictures(), {}


def vgg() -> Case:
    """Return a VGG in small, with its dropout."""
    trunk = nn.Sequential(conv(3, 8), conv(8, 8), nn.MaxPool2d(2), conv(8, 16), nn.MaxPool2d(2), nn.Dropout(0.5))
    return Classifier(trunk, 16), pictures(), {}


class Inverted(nn.Module):
    """MobileNet's block, with squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.deep, self.down = (
            conv(width, 4 * width, 1),
            conv(4 * width, 4 * width, 3, 1, 4 * width),
            nn.Conv2d(4 * width, width, 1),
        )
        self.squeeze, self.excite = nn.Linear(4 * width, width), nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = self.deep(self.up(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1).flatten(1)))))
        return x + self.down(y * gate[:, :, None, None])


def mobilenet() -> Case:
    """Return a MobileNetV3 in small."""
    return Classifier(nn.Sequential(conv(3, 8, 3, 2), Inverted(8), Inverted(8)), 8), pictures(), {}


class Dense(nn.Module):
    """DenseNet's block: every layer reads all before it."""

    def __init__(self, width: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(width + n * growth, growth) for n in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all features beside each other."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet() -> Case:
    """Return a DenseNet in small."""
    return Classifier(nn.Sequential(conv(3, 8), Dense(8, 8, 4), nn.AvgPool2d(2), Dense(40, 8, 4)), 72), pictures(), {}


class Shuffle(nn.Module):
    """ShuffleNet's unit: channels split, and shuffled by views."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv(width // 2, width // 2, 1), conv(width // 2, width // 2, 3, 1, width // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the unit's output."""
        one, two = x.chunk(2, 1)
        x = torch.cat([one, self.branch(two)], 1)
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def shufflenet() -> Case:
    """Return a ShuffleNetV2 in small."""
    return Classifier(nn.Sequential(conv(3, 16, 3, 2), Shuffle(16), Shuffle(16)), 16), pictures(), {}


class UNet(nn.Module):
    """Down, up, and the skips between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, width), conv(width, 2 * width), conv(2 * width, 4 * width)])
        self.up = nn.ModuleList([conv(6 * width, 2 * width), conv(3 * width, width)])
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of every pixel's class."""
        skips = []
        for level, layer in enumerate(self.down):
            x = layer(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0, mode="bilinear"), skips.pop()], 1))
        return F.cross_entropy(self.out(x), target)


def unet() -> Case:
    """Return a U-Net in small."""
    return UNet(), (torch.randn(4, 3, 32, 32), torch.randint(2, (4, 32, 32))), {}


class Diffusion(nn.Module):
    """A denoiser that draws its noise and times in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Embedding(10, 8), nn.ModuleList([conv(3, 8), conv(8, 8)])
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of the noise that it finds."""
        times = torch.randint(10, (x.shape[0],), device=x.device)
        noise, alpha = torch.randn_like(x), self.alphas[times][:, None, None, None]
        y = self.body[0](alpha.sqrt() * x + (1 - alpha).sqrt() * noise) + self.time(times)[:, :, None, None]
        return F.mse_loss(self.out(self.norm(self.body[1](y))), noise)


def diffusion() -> Case:
    """Return a diffusion model in small."""
    return Diffusion(), (torch.randn(4, 3, 16, 16),), {}


class Language(nn.Module):
    """An LSTM language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next tokens."""
        return F.cross_entropy(
            self.head(self.lstm(self.embed(tokens[:, :-1]))[0]).flatten(0, 1), tokens[:, 1:].flatten()
        )


def lstm() -> Case:
    """Return the LSTM language model."""
    return Language(), (torch.randint(50, (4, 12)),), {}


class Translator(nn.Module):
    """GRU to GRU, with attention and a loop over the target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.cell = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True), nn.GRUCell(32, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the target's tokens."""
        seen, state = self.encoder(self.embed(source))
        state, losses = state[0], []
        for position in range(target.shape[1] - 1):
            weights = torch.einsum("bd,btd->bt", state, seen).softmax(-1)
            context = torch.einsum("bt,btd->bd", weights, seen)
            state = self.cell(torch.cat([self.embed(target[:, position]), context], 1), state)
            losses.append(F.cross_entropy(self.head(state), target[:, position + 1]))
        return torch.stack(losses).mean()


def translator() -> Case:
    """Return the translator."""
    return Translator(), (torch.randint(50, (4, 9)), torch.randint(50, (4, 7))), {}


class Encoder(nn.Module):
    """torch's own transformer, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.embed, self.encoder, self.head = nn.Embedding(50, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each text's class."""
        return F.cross_entropy(
            self.head(self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0)[:, 0]), labels
        )


def encoder() -> Case:
    """Return the encoder."""
    return Encoder(), (torch.randint(1, 50, (4, 12)), torch.randint(5, (4,))), {}


class Experts(nn.Module):
    """A mixture of experts with a capacity, in products alone, and a loss that balances it."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up, self.down = (nn.Parameter(torch.randn(experts, *shape)) for shape in ((width, 32), (32, width)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the balance."""
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        best = F.one_hot(gates.argmax(-1), gates.shape[-1]).to(x.dtype)
        place = best.cumsum(0) * best
        kept = best * (place <= 24)
        inner = F.gelu(torch.einsum("te,td,edh->teh", kept, tokens, self.up))
        out = torch.einsum("teh,ehd,te->td", inner, self.down, gates * kept)
        return x + out.view_as(x), (gates.mean(0) * best.mean(0)).sum() * best.shape[1]


def moe() -> Case:
    """Return a mixture of experts that drops what is over capacity."""
    return Experts(), (torch.randn(4, 12, 16),), {}


class Vae(nn.Module):
    """A variational autoencoder, which draws in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Sequential(nn.Linear(8, 64))
        self.mean, self.spread = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the negative bound."""
        hidden = self.encoder(x)
        mean, log = self.mean(hidden), self.spread(hidden)
        drawn = mean + torch.randn_like(mean) * (log / 2).exp()
        return F.mse_loss(self.decoder(drawn), x) - 0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()


def vae() -> Case:
    """Return the variational autoencoder."""
    return Vae(), (torch.randn(4, 64),), {}


def critic() -> Case:
    """Return a GAN's critic, its weights normalised in the forward pass."""
    body = [spectral_norm(nn.Conv2d(3, 8, 3, 2)), nn.LeakyReLU(0.2), weight_norm(nn.Conv2d(8, 8, 3, 2)), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(392, 1)), (torch.randn(4, 3, 32, 32),), {}


class Contrast(nn.Module):
    """Every sample against every other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(16, 8), nn.Linear(16, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of telling who belongs to whom."""
        logits = self.scale.exp() * F.normalize(self.one(x)) @ F.normalize(self.two(y)).T
        right = torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def contrast() -> Case:
    """Return the contrastive model."""
    return Contrast(), (torch.randn(4, 16), torch.randn(4, 16)), {}


class Recommender(nn.Module):
    """Embedding bags, dense features and all their products (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum") for _ in range(3))
        self.dense, self.top = nn.Linear(4, 8), nn.Linear(8 + 6, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return the score of every sample."""
        features = [self.dense(dense), *(bag(sparse[:, n]) for n, bag in enumerate(self.bags))]
        stacked = torch.stack(features, 1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([features[0], products[:, rows, columns]], 1))


def recommender() -> Case:
    """Return the recommender."""
    return Recommender(), (torch.randn(4, 4), torch.randint(100, (4, 3, 5))), {}


HANDWRITTEN: dict[str, Callable[[], Case]] = {
    "ResNet": resnet,
    "VGG": vgg,
    "MobileNet": mobilenet,
    "DenseNet": densenet,
    "ShuffleNet": shufflenet,
    "U-Net": unet,
    "diffusion": diffusion,
    "LSTM, tied": lstm,
    "GRU with attention": translator,
    "nn.TransformerEncoder": encoder,
    "MoE with capacity": moe,
    "VAE": vae,
    "critic, normed weights": critic,
    "contrastive": contrast,
    "DLRM": recommender,
}
