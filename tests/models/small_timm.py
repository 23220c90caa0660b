"""A small vision transformer with the structure and names of timm's; timm itself is not a dependency."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import ImageClassifierOutput

from echelon.shardformer import register_class
from echelon.shardformer.tables.vision import TIMM_VIT

# B batch, N patches and tokens, C width

HEIGHT, WIDTH, PATCH = 9, 15, 3


class PatchEmbed(nn.Module):
    """Patch embedding of pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Attention with one projection for query, key and value, and per-head norms."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = num_heads, width // num_heads, width
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        batch, length, _ = x_BNC.shape
        shape = (batch, length, 3, self.num_heads, self.head_dim)
        query, key, value = self.qkv(x_BNC).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.q_norm(query) @ self.k_norm(key).transpose(-2, -1) * self.head_dim**-0.5
        out = self.attn_drop(scores.softmax(-1)) @ value
        return self.proj(self.norm(out.transpose(1, 2).reshape(batch, length, self.attn_dim)))


class Mlp(nn.Module):
    """Two linear layers, with dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2 = nn.Identity(), nn.Linear(2 * width, width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.fc2(self.norm(self.drop1(self.act(self.fc1(x_BNC)))))


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self.attn(self.norm1(x_BNC))
        return x_BNC + self.mlp(self.norm2(x_BNC))


class VisionTransformer(nn.Module):
    """Classifier of images with 5 classes. Class token and position embeddings are its own parameters."""

    def __init__(self, *, width: int = 32, num_heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(width)
        num_patches = (HEIGHT // PATCH) * (WIDTH // PATCH)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, num_patches + 1, width))
        self.norm_pre = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        x_BNC = self.patch_embed(pixels)
        x_BNC = torch.cat([self.cls_token.expand(len(x_BNC), -1, -1), x_BNC], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(self.norm_pre(x_BNC)))[:, 0])


register_class(TIMM_VIT, f"{VisionTransformer.__module__}.{VisionTransformer.__qualname__}")


def build_timm() -> VisionTransformer:
    """Build the model, equal on all ranks, in training mode."""
    torch.manual_seed(0)
    return VisionTransformer().train()


def timm_pixels(num_samples: int, seed: int = 1) -> Tensor:
    """Return images that are not square, equal on all ranks."""
    return torch.randn(num_samples, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


class TimmConfig(PretrainedConfig):
    """Config for the parity check, to build the model and draw batches; the model itself has none."""

    model_type = "timm"

    def __init__(self, **settings: Any) -> None:
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
        images = {"image_size": (HEIGHT, WIDTH), "patch_size": PATCH, "num_channels": 3}
        super().__init__(**sizes | images | settings)


class TimmForImageClassification(VisionTransformer):
    """The model with a loss, called by the parity check like models of transformers."""

    main_input_name = "pixel_values"

    def __init__(self, config: TimmConfig) -> None:
        super().__init__(
            width=config.hidden_size, num_heads=config.num_attention_heads, depth=config.num_hidden_layers
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> ImageClassifierOutput:  # type: ignore[override]
        logits = super().forward(pixel_values)
        return ImageClassifierOutput(loss=F.cross_entropy(logits, labels), logits=logits)

    def get_input_embeddings(self) -> None: ...

    def get_output_embeddings(self) -> None: ...


def register_timm() -> None:
    """Register the model type for `ModelChoice`."""
    AutoConfig.register("timm", TimmConfig, exist_ok=True)
    AutoModelForImageClassification.register(TimmConfig, TimmForImageClassification, exist_ok=True)
