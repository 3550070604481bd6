"""DistributedDataParallel, two gloo processes: idle experts and a rank without tokens."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import D, E
from moiety import FeedForward, ModuleExperts, MoE, build_router, watch
from ranks import of_two

KINDS = ("grouped", "loop", "modules")
# The experts that the tokens of each rank may go to, two of five a token.
CASES = {
    "all busy": (range(E), range(E)),
    "one idle on a rank": (range(E), (0, 1, 2, 3)),
    "one idle on both": ((0, 1, 2, 3), (0, 1, 2)),
    "others on each": ((0, 1), (3, 4)),
    "no token on a rank": (range(E), None),
}


def layer_of(kind):
    torch.manual_seed(0)
    if kind == "modules":
        experts = ModuleExperts([nn.Linear(D, D) for _ in range(E)], dim=D)
    else:
        experts = FeedForward(E, D, 24)
    backend = "auto" if kind == "modules" else kind
    layer = MoE(build_router("top-k", dim=D, experts=E), experts, balance={"z": 0.1},
                backend=backend)  # fmt: skip
    layer.router.weight.data = 5 * torch.eye(E, D)  # token axis e asks for expert e
    return layer


def tokens_of(allowed, rank):
    if allowed is None:
        return torch.zeros(0, D)
    draw = torch.Generator().manual_seed(rank)
    x = 0.1 * torch.randn(6, D, generator=draw)
    for t in range(6):
        for place in range(2):
            x[t, list(allowed)[(t + place) % len(allowed)]] = 2.0 + place
    return x


def loss_of(model, x):
    with watch(model) as routes:
        y = model(x)
        loss = y.square().sum() + routes.loss()
    return loss, next(iter(routes.load().values()))


def work(rank, results):
    for kind in KINDS:
        for case, ranks in CASES.items():
            model = DistributedDataParallel(layer_of(kind), find_unused_parameters=False)
            for _ in range(2):  # an unfinished reduction would show in the second step
                model.zero_grad()
                loss, load = loss_of(model, tokens_of(ranks[rank], rank))
                loss.backward()
            if rank == 0:
                grads = {n: p.grad for n, p in model.module.named_parameters()}
                results[kind, case] = (grads, load)
            dist.barrier()


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    """The gradients of every case, from one pair of processes."""
    return of_two(work, tmp_path_factory.mktemp("ranks"))


def test_gradients_are_the_average_over_ranks(reduced):
    for kind in KINDS:
        for case, ranks in CASES.items():
            layer = layer_of(kind)
            total = None
            for rank in range(2):
                loss, load = loss_of(layer, tokens_of(ranks[rank], rank))
                busy = {e for e, n in enumerate(load.tolist()) if n}
                assert busy == set(ranks[rank] or ()), (kind, case)
                total = loss if total is None else total + loss
            want = torch.autograd.grad(total / 2, list(layer.parameters()))
            got, _ = reduced[kind, case]
            for (name, _), w in zip(layer.named_parameters(), want):
                torch.testing.assert_close(got[name], w, msg=f"{kind}, {case}: {name}")
