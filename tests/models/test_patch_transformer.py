"""The small transformer: shapes, where experts go, and what torch counts of its attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moiety
from moiety import cost
from moiety.models import PatchTransformer, dense
from moiety.models.patch_transformer import Attention


def small(**changes):
    return PatchTransformer(**({"patches": 6, "patch_dim": 4, "classes": 3, "dim": 16} | changes))


def test_one_row_of_logits_an_example():
    assert small()(torch.randn(5, 6, 4)).shape == (5, 3)


def test_the_factory_is_asked_once_a_block_with_the_width():
    asked = []

    def feedforward(dim):
        asked.append(dim)
        return moiety.MoE("top-k", dim=dim, hidden=8, experts=4, activation=F.gelu)

    model = small(depth=2, feedforward=feedforward)
    with moiety.watch(model) as routes:
        model(torch.randn(2, 6, 4)).sum().backward()
    assert asked == [16, 16]
    assert list(routes.load()) == ["blocks.0.feedforward", "blocks.1.feedforward"]


def test_positions_matter_and_batch_does_not():
    model, x = small(), torch.randn(4, 6, 4)
    torch.testing.assert_close(model(x)[:2], model(x[:2]))
    assert not torch.allclose(model(x), model(x.flip(1)))


def test_attention_is_that_of_torch():
    ours, theirs = Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight, theirs.in_proj_bias = ours.qkv.weight, ours.qkv.bias
    theirs.out_proj.weight, theirs.out_proj.bias = ours.out.weight, ours.out.bias
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


def test_every_product_is_counted():
    model, x = small(depth=1, feedforward=lambda dim: dense(dim, 32)), torch.randn(1, 6, 4)
    attention = 4 * 16 * 16 + 2 * 6 * 16  # four projections, scores and mixture, a patch
    expected = 2 * (6 * (4 * 16 + attention + 2 * 16 * 32) + 16 * 3)
    assert cost.forward_flops(lambda: model(x), model) == expected


@pytest.mark.parametrize("shape", [(6, 4), (2, 5, 4), (2, 6, 3)])
def test_a_wrong_shape_says_the_right_one(shape):
    with pytest.raises(ValueError, match=r"\[B, 6, 4\]"):
        small()(torch.randn(shape))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="16 cannot be divided among 3"):
        small(heads=3)
