"""The presets: shapes, equal active FLOPs whatever the router, padding that reaches no expert."""

import pytest
import torch

import moiety
from moiety import cost
from moiety.models import ImageTransformer, TableNet, TextTransformer, feedforward, make_tokenizer
from moiety.models.image import patch_size

ROUTERS = moiety.list_routers()


def image(router="dense", **words):
    return ImageTransformer(
        shape=(1, 12, 10), outputs=3, feedforward=feedforward(router, hidden=64, **words)
    )


def flops(model, *inputs):
    for layer in model.modules():
        if isinstance(layer, moiety.MoE):
            layer.backend = "loop"
    return cost.forward_flops(lambda: model(*inputs), model)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_works_as_much_as_dense(router):
    images = torch.randint(0, 256, (16, 1, 12, 10), dtype=torch.uint8)
    ratio = flops(image(router), images) / flops(image(), images)
    # Switch drops what exceeds its capacity, before training more than a little.
    assert (0.8 if router == "switch" else 0.99) < ratio < 1.06


@pytest.mark.parametrize(("k", "width"), [(1, 64), (2, 32), (3, 21), (8, 8)])
def test_experts_share_the_width_of_the_dense_part(k, width):
    layer = feedforward("top-k", hidden=64, k=k)(16)
    assert layer.router.k == k and layer.experts.hidden == width


def test_options_of_an_arm_come_first():
    layer = feedforward("top-k", hidden=64, balance={"switch": 0.5})(16)
    assert layer.balance == {"switch": 0.5}
    assert feedforward("top-k", hidden=64)(16).balance == {"switch": 0.01}
    by_expert = feedforward("expert-choice", hidden=64, capacity_factor=4.0)(16)
    assert by_expert.experts.hidden == 16 and by_expert.group == "example"
    assert feedforward("expert-choice", hidden=64, per_example=False)(16).group is None


def test_asking_for_a_layer_draws_nothing():
    state = torch.get_rng_state()
    feedforward("cosine", hidden=64)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("size", "patch"), [((8, 8), 2), ((28, 28), 7), ((32, 20), 8), ((64, 64), 10)]
)
def test_patches_follow_the_size(size, patch):
    assert patch_size(*size) == patch


def test_images_of_odd_sizes_are_filled_up():
    model = ImageTransformer(shape=(3, 9, 7), outputs=4, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
    images = torch.randint(0, 256, (2, 3, 9, 7), dtype=torch.uint8)
    assert model(images).shape == (2, 4)
    changed = images.clone()
    changed[:, :, -1, -1] = 255 - changed[:, :, -1, -1]  # the last pixel counts as well
    assert not torch.equal(model(images), model(changed))


def test_a_table_of_numbers_alone_of_categories_alone_and_of_neither():
    none = torch.empty(5, 0)
    assert TableNet(numbers=2, cardinalities=[], outputs=1)(
        torch.randn(5, 2), none.long()
    ).shape == (5, 1)
    ids = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 0], [1, 2]])
    assert TableNet(numbers=0, cardinalities=[3, 3], outputs=2)(none, ids).shape == (5, 2)
    with pytest.raises(ValueError, match="at least one column"):
        TableNet(numbers=0, cardinalities=[], outputs=2)


# -- texts -----------------------------------------------------------------------------------------


def text_model(router):
    return TextTransformer(
        vocabulary=50, outputs=2, length=12, feedforward=feedforward(router, hidden=32)
    ).eval()


@pytest.mark.parametrize("router", ["dense", "top-k", "hash", "expert-choice"])
def test_padding_changes_no_answer(router):
    model, ids = text_model(router), torch.randint(3, 50, (3, 6))
    mask = torch.ones_like(ids)
    padded = torch.cat([ids, torch.randint(0, 50, (3, 4))], 1)
    longer = torch.cat([mask, torch.zeros(3, 4, dtype=torch.long)], 1)
    if router == "expert-choice":  # its capacity counts places, so compare two kinds of padding
        other = torch.cat([ids, torch.randint(0, 50, (3, 4))], 1)
        torch.testing.assert_close(model(padded, longer), model(other, longer))
    else:
        torch.testing.assert_close(model(padded, longer), model(ids, mask))


def test_padding_takes_no_slot():
    model, ids = text_model("top-k"), torch.randint(3, 50, (3, 6))
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4, [1] * 4 + [0] * 2])
    with moiety.watch(model) as routes:
        model(ids, mask)
    assert all(int(load.sum()) == 2 * 12 for load in routes.load().values())


def test_a_text_that_is_too_long_says_so():
    with pytest.raises(ValueError, match="13 tokens are longer than the 12"):
        text_model("dense")(torch.zeros(1, 13, dtype=torch.long), torch.ones(1, 13))


def test_the_vocabulary_comes_from_the_texts_given():
    tokenizer = make_tokenizer(["Good fish, good fish!", "bad FISH"] * 3)
    assert tokenizer.token_to_id("fish") is not None
    assert tokenizer.encode("GOOD fish").tokens == ["[START]", "good", "fish"]
    assert tokenizer.encode("").tokens == ["[START]"]  # no text is empty
    assert "[UNK]" in tokenizer.encode("ψ").tokens
