"""The image classifiers of the robustness studies: ViT, ViT++ and V-MoE, small; and their images.

data = pictures({"data": "cifar10", "train": None}, torch.device("cpu"))
model = build({"model": "v-moe", "experts": 8, **sizes}, seed=0, **data.facts)
logits = model(images)                       # [B, C, H, W] in [0, 1] -> [B, classes]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ... import cost
from ...data.load import load_problem
from ...data.problem import Split
from ...lab.study import Settings
from ...models import PatchTransformer, dense
from ...moe import MoE
from ...train import seeded

CAPACITY = 1.5
COUNTED = 500  # images over which FLOPs are counted, since drops depend on them
# What a router is given here. Those without a loss of their own get one, or experts would starve.
EVEN = {"importance": 0.01}
ROUTERS: dict[str, dict[str, Any]] = {
    "noisy-top-k": {"k": 2},  # V-MoE's, with its losses and its noise of 1/E
    "top-k": {"k": 2, "balance": EVEN},
    "cosine": {"k": 2, "balance": EVEN},
    "perturbed-cosine": {"k": 2, "balance": EVEN},
    "dselect-k": {"k": 2, "slots": 2, "balance": EVEN},
    "sigmoid-balanced": {"k": 2},
    "expert-choice": {"capacity_factor": 2.0},  # two experts a token in the mean
}


class Vision(nn.Module):
    """Normalises images by channel, cuts them into squares, classifies them by a transformer."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        shape: Sequence[int],
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        patch: int,
        **trunk: Any,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        if height % patch or width % patch:
            raise ValueError(
                f"images of {height}×{width} pixels have no patches of {patch}×{patch}"
            )
        self.patch = patch
        self.register_buffer("mean", torch.tensor([*mean]).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor([*std]).view(-1, 1, 1))
        self.trunk = PatchTransformer(
            patches=(height // patch) * (width // patch),
            patch_dim=channels * patch**2,
            classes=classes,
            **trunk,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images `[B, C, H, W]` in [0, 1]."""
        x = (images - self.mean) / self.std
        # Not F.unfold, which on a GPU launches a kernel for every image.
        x = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # [B, C, h, p, w, p]
        return self.trunk(x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))


def every_second(make: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Feed-forward parts for block after block: dense in 0, 2, …, made by `make` in 1, 3, …"""
    number = -1

    def feedforward(dim: int) -> nn.Module:
        nonlocal number
        number += 1
        return make(dim) if number % 2 else dense(dim)

    return feedforward


def experts_of(settings: Settings, tokens: int) -> Callable[[int], nn.Module]:
    """What makes an MoE layer for images of so many tokens; an expert is as wide as a dense part.

    A capacity is one image's, so that what the others of a batch are changes nothing for it.
    """
    name, experts = router_of(settings), settings["experts"]
    words = {"group": "example", **ROUTERS[name]}
    if "k" in words:
        words["k"] = min(words["k"], experts)
        words["capacity_factor"] = capacity_factor(tokens, words["k"], experts)
    return lambda dim: MoE(
        name, experts, dim=dim, hidden=4 * dim, activation=F.gelu, same_init=True, **words
    )


def capacity_factor(tokens: int, k: int, experts: int) -> float:
    """The factor of 1.5, or what makes an expert's slots a multiple of 4, as V-MoE rounds them."""
    slots = math.ceil(tokens * k * CAPACITY / experts / 4) * 4
    return slots * experts / (tokens * k)


def router_of(settings: Settings) -> str:
    """The registered name; V-MoE's router is the noisy top-k as it comes."""
    name = settings.get("router", "v-moe")
    name = "noisy-top-k" if name == "v-moe" else name
    if name not in ROUTERS:
        raise ValueError(f"no model here has the router {name!r}; there are {', '.join(ROUTERS)}")
    return name


def build(settings: Settings, *, seed: int, **pictures: Any) -> Vision:
    """The model of some settings from a seed; `pictures` are shape, classes, mean and std."""
    dim, depth, heads = settings["dim"], settings["depth"], settings["heads"]
    kind, feedforward = settings["model"], None
    if kind == "vit++":  # as ViT-B++ to ViT-B: 18 layers to 12, width 896 to 768
        dim, depth = round(dim * 7 / 6 / heads) * heads, depth * 3 // 2
    elif kind == "v-moe":
        _, height, width = pictures["shape"]
        tokens = (height // settings["patch"]) * (width // settings["patch"])
        feedforward = every_second(experts_of(settings, tokens))
    elif kind != "vit":
        raise ValueError(f"no model is called {kind!r}; there are vit, vit++ and v-moe")
    with seeded(seed):
        return Vision(
            patch=settings["patch"],
            dim=dim,
            depth=depth,
            heads=heads,
            feedforward=feedforward,
            **pictures,
        )


def flops(model: Vision, data: TensorDataset) -> float:
    """Forward FLOPs for an image, counted while the model runs."""
    x = data.tensors[0][:COUNTED]
    usual = {part: part.backend for part in model.modules() if isinstance(part, MoE)}
    for layer in usual:
        layer.backend = "loop"  # the plain path, all of whose products torch counts
    total = cost.forward_flops(lambda: model(x), model)
    for layer, backend in usual.items():
        layer.backend = backend
    return total / len(x)


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images in [0, 1] and classes on some device, and what a model must know of them."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    facts: dict[str, Any]  # shape, classes, mean, std

    def attacked(self, images: int) -> tuple[Tensor, Tensor]:
        """The test images that are attacked: the same for all models and seeds."""
        order = torch.randperm(len(self.test), generator=torch.Generator().manual_seed(0))
        x, y = self.test.tensors
        rows = order[:images].to(x.device)
        return x[rows], y[rows]


def pictures(settings: Settings, device: torch.device) -> Pictures:
    """The data of a scale; the same for every seed."""
    return _pictures(settings["data"], settings["train"], device)


@lru_cache(maxsize=1)  # a worker runs trial after trial of one scale
def _pictures(name: str, rows: int | None, device: torch.device) -> Pictures:
    problem = load_problem(name)

    def there(part: Split, rows: int | None = None) -> TensorDataset:
        images = part.inputs["images"][:rows].to(device)
        (classes,) = part.targets.values()
        return TensorDataset(images.float() / 255, classes[:rows].to(device))

    facts = {
        "shape": problem.shape,
        "classes": len(problem.targets[0].classes),
        "mean": problem.mean,
        "std": problem.std,
    }
    return Pictures(
        there(problem.train, rows), there(problem.validation), there(problem.test), facts
    )


def augment(x: Tensor, pixels: int) -> Tensor:
    """Images moved by up to so many pixels (black comes in), every second one mirrored; 0: as is.

    The numbers come from the device's own generator, which a checkpoint of the training holds.
    """
    if not pixels:
        return x
    images, channels, height, width = x.shape
    moved = torch.randint(2 * pixels + 1, (2, images, 1), device=x.device)
    mirrored = torch.rand(images, 1, device=x.device) < 0.5
    row = moved[0] + torch.arange(height, device=x.device)
    column = moved[1] + torch.arange(width, device=x.device)
    column = torch.where(mirrored, column.flip(-1), column)
    each = torch.arange(images, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    x = F.pad(x, [pixels] * 4)
    return x[each, channel, row[:, None, :, None], column[:, None, None, :]]
