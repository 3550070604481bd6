"""All kinds of experts pass the suite, and broken ones fail the right check."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moiety import FeedForward, LowRank, ModuleExperts
from moiety.testing import check_experts, checks


def module(dim):
    return nn.Sequential(nn.Linear(dim, 6), nn.ReLU(), nn.Linear(6, dim))


KINDS = {
    "plain": lambda e, d: FeedForward(e, d, 8, activation=torch.relu, dropout=0.5),
    "no-bias": lambda e, d: FeedForward(e, d, 8, activation=torch.relu, bias=False),
    "gated": lambda e, d: FeedForward(e, d, 8, activation=F.silu, gated=True),
    "odd-width": lambda e, d: FeedForward(e, d, 7, activation=F.silu, gated=True, out_dim=5),
    "low-rank": lambda e, d: LowRank(module(d), e, d, rank=4),
    "low-rank-trained-base": lambda e, d: LowRank(module(d), e, d, rank=4, frozen=False),
    "modules": lambda e, d: ModuleExperts([module(d) for _ in range(e)], dim=d),
}


class NoBias(FeedForward):
    """Its grouped product forgets the second bias."""

    caught_by = "backends_agree"

    def grouped(self, rows_ND, plan):
        b_out, self.b_out = self.b_out, None
        y_ND = super().grouped(rows_ND, plan)
        self.b_out = b_out
        return y_ND


class FreeOfCharge(FeedForward):
    """It tells half of what it costs."""

    caught_by = "flops_are_counted"

    def flops_per_row(self):
        return [n / 2 for n in super().flops_per_row()]


class SkipsIdle(ModuleExperts):
    """Its idle experts are left out of the graph."""

    caught_by = "idle_experts_get_gradients"

    def loop(self, rows):
        for member, x in zip(self.members, rows, strict=True):
            yield self._call(member, x) if len(x) else x + 0.0


class Rounds(FeedForward):
    """Its copies are not exact."""

    caught_by = "copies_are_equal"

    def copy(self, parents):
        rows = super().copy(parents)
        self.w_in.data[self.experts - 1] += 1e-3
        return rows


BROKEN = {
    NoBias: lambda e, d: NoBias(e, d, 8, activation=torch.relu),
    FreeOfCharge: lambda e, d: FreeOfCharge(e, d, 8, activation=torch.relu),
    SkipsIdle: lambda e, d: SkipsIdle([module(d) for _ in range(e)], dim=d),
    Rounds: lambda e, d: Rounds(e, d, 8, activation=torch.relu),
}


@pytest.mark.parametrize("check", checks("experts"), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind, check):
    check(KINDS[kind])


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_broken_experts_fail_the_right_check(cls):
    with pytest.raises(AssertionError) as failure:
        check_experts(BROKEN[cls])
    assert str(failure.value).startswith(f"experts {cls.__name__} fails {cls.caught_by}: ")
