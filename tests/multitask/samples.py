"""Small problems that the tests of this folder share."""

import torch

from moiety import FeedForward
from moiety.multitask import MultiGate, Task

TASKS = [Task("a", size=3), Task("type", "labels", size=2), Task("c.d", "number", weight=0.3)]
DIM, EXPERTS = 16, 6


def problem(examples=44, dtype=torch.float32, missing=True):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(examples, DIM, generator=g, dtype=dtype)
    targets = {
        "a": torch.randint(0, 3, (examples,), generator=g),
        "type": torch.randint(0, 2, (examples, 2), generator=g).to(dtype),
        "c.d": torch.randn(examples, generator=g, dtype=dtype),
    }
    if missing:
        targets["a"][::3] = -100
        targets["type"][1::4, 0] = torch.nan
        targets["c.d"][::2] = torch.nan
    return x, targets


def feedforward(**words):
    return FeedForward(EXPERTS, DIM, 8, activation=torch.relu, **words)


def gated(router="dselect-k-static", **words):
    return MultiGate(TASKS, words.pop("experts", None) or feedforward(), router=router, **words)


def make_binary(model, codes):
    """Set the digits of static DSelect-k gates: for each task the experts of its selectors."""
    with torch.no_grad():
        for router, experts in zip(model.routers, codes, strict=True):
            for i, expert in enumerate(experts):
                for j in range(router.digits):
                    router.z[i, j] = 1.0 if expert >> j & 1 else -1.0
    return model
