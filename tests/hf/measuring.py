"""What upcycling changed, measured by hand: apart from how the package does it."""

import torch
from torch import Tensor, nn

from moiety.hf.probe import Probe, make_probe

# The thirteen are held to these starts; what sees later tokens is for encoders.
LOW = {"init": "low-rank", "rank": 2}
STARTS = {
    "copy": {"router": "top-k", "k": 2, "init": "copy"},
    "switch": {"router": "switch", **LOW},
    "dselect-k": {"router": "dselect-k", "k": 2, **LOW},
    "expert-choice": {"router": "expert-choice", **LOW},
}
KEPT = 1e-5  # the check: a right model moves its outputs by no more
SHOWN = 1e-4  # a wrong one by more than this


def another_batch(model: nn.Module, seed: int = 7) -> Probe:
    """Other inputs than the probe's, the second example shorter where there is a mask."""
    draw = torch.Generator().manual_seed(seed)
    probe = make_probe(model)

    def other(word: str, value: Tensor) -> Tensor:
        if word.endswith("mask") and value.dim() == 2:
            value = value.clone()
            value[1, -5:] = 0
        elif word != "noise" and value.is_floating_point():
            value = torch.randn(value.shape, generator=draw).to(value.dtype)
        elif word.endswith("input_ids"):
            value = value[:, torch.randperm(value.shape[1], generator=draw)]
        return value

    args = tuple(other("", value) for value in probe.args)
    return Probe(args, {word: other(word, value) for word, value in dict(probe.kwargs).items()})


def measured(dense: nn.Module, moe: nn.Module, batch: Probe) -> float:
    """The largest change of a number, relative to the root mean square of its output."""
    gaps = []
    for a, b in zip(batch.outputs(dense), batch.outputs(moe), strict=True):
        finite = torch.isfinite(a)  # DistilBERT's and kin fill masked scores with -inf
        gaps.append(float((b - a)[finite].abs().max() / a[finite].square().mean().sqrt()))
    assert gaps
    return max(gaps)
