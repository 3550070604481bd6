"""What is hidden: how much of it, what is shown instead, and never anything special."""

import pytest
import tiny
import torch

from moiety.adapt.encoders import Encoder
from moiety.adapt.masks import mean_over_masked, patch_noise, token_mask

MASK, WORDS = 4, torch.arange(5, 48)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_share_of_the_tokens_is_hidden_80_10_10():
    ids = torch.randint(5, 48, (400, 100), generator=generator(1))
    shown = token_mask(ids, torch.ones_like(ids).bool(), WORDS, MASK, generator())
    chosen = shown >= 0
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.005)
    hidden = shown[chosen] == MASK
    kept = shown[chosen] == ids[chosen]
    assert hidden.float().mean() == pytest.approx(0.8, abs=0.02)
    # A word in 43 is drawn in its own place.
    assert kept.float().mean() == pytest.approx(0.1 + 0.1 / 43, abs=0.015)
    drawn = shown[chosen & (shown != MASK) & (shown != ids)]
    assert set(drawn.tolist()) == set(WORDS.tolist())


def test_neither_padding_nor_special_tokens_are_hidden():
    encoder = Encoder.load(tiny.FAMILIES["bert"](), processor=tiny.tokenizer())
    batch = encoder.batch(tiny.texts(64, 1, 20))
    for seed in range(5):
        mask = encoder.mask(batch, generator(seed))
        ids = batch["input_ids"][mask >= 0]
        assert int(ids.min()) >= len(tiny.SPECIAL)
        assert set(mask.unique().tolist()) - {-1, MASK} <= set(WORDS.tolist())
        assert bool((mask >= 0).any(1).all())  # at least one of every text


def test_another_rate_hides_another_share():
    ids = torch.full((50, 100), 7)
    every = token_mask(ids, ids > 0, WORDS, MASK, generator(), rate=1.0)
    one = token_mask(ids, ids > 0, WORDS, MASK, generator(), rate=0.0)
    assert bool((every >= 0).all())
    assert (one >= 0).sum(1).tolist() == [1] * 50


def test_a_text_of_nothing_but_special_tokens_hides_nothing():
    ids = torch.tensor([[2, 3, 0], [2, 9, 3]])
    mask = token_mask(ids, ids > 4, WORDS, MASK, generator())
    assert (mask >= 0).tolist() == [[False] * 3, [False, True, False]]
    values = torch.tensor([[5.0, 5.0, 5.0], [1.0, 4.0, 1.0]])
    assert float(mean_over_masked(values, mask >= 0)) == 2.0


def test_masks_come_from_their_generator_alone():
    ids = torch.full((4, 30), 7)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = token_mask(ids, ids > 0, WORDS, MASK, generator(5))
    noise = patch_noise(3, 16, generator(5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(token_mask(ids, ids > 0, WORDS, MASK, generator(5)), one)
    assert torch.equal(patch_noise(3, 16, generator(5)), noise)
    assert not torch.equal(token_mask(ids, ids > 0, WORDS, MASK, generator(6)), one)
    assert not torch.equal(patch_noise(3, 16, generator(6)), noise)


def test_each_example_counts_alike_and_unmasked_places_not_at_all():
    values = torch.tensor([[1.0, 3.0, float("nan")], [10.0, 7.0, float("inf")]])
    where = torch.tensor([[True, True, False], [True, False, False]])
    assert float(mean_over_masked(values, where)) == 6.0  # (2 + 10) / 2
    values.requires_grad_()
    mean_over_masked(values, where).backward()
    assert values.grad.tolist() == [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
