"""Composed images: one pair by hand, and the real sets where they are."""

import os
from pathlib import Path

import pytest
import torch

from moiety.data.composed import compose, multi_digits
from moiety.data.named import find, load_named

DATA = Path(os.environ.get("MOIETY_DATA") or Path(__file__).parents[3] / "shared" / "data")


def need(name):
    if find(name, DATA) is None:
        pytest.skip(f"{name} is not here: set MOIETY_DATA to the folder of the data sets")


@pytest.mark.parametrize(("overlay", "both"), [("max", 200), ("sum", 255)])
def test_a_pair_by_hand(overlay, both):
    top_left = torch.full((1, 1, 28, 28), 100, dtype=torch.uint8)
    bottom_right = torch.full((1, 1, 28, 28), 200, dtype=torch.uint8)
    image = compose(top_left, bottom_right, overlay)
    assert (image.shape, image.dtype) == ((1, 1, 36, 36), torch.uint8)
    # The first covers rows and columns 0 to 27, the second 8 to 35.
    expected = torch.zeros(36, 36, dtype=torch.uint8)
    expected[:28, :28] = 100
    expected[8:, 8:] = 200
    expected[8:28, 8:28] = both
    assert torch.equal(image[0, 0], expected)
    assert (top_left == 100).all()
    assert (bottom_right == 200).all()


def test_a_sum_below_the_limit_is_the_sum():
    one = torch.full((1, 1, 9, 9), 100, dtype=torch.uint8)
    assert compose(one, one, "sum")[0, 0, 8, 8] == 200
    assert compose(one, one, "max")[0, 0, 8, 8] == 100


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_both_images_are_there_with_their_labels(name):
    need(name)
    problem = multi_digits(name, counts=(200, 50, 60), data_dir=DATA)
    assert problem.shape == (1, 36, 36)
    assert [len(split) for split in problem.splits.values()] == [200, 50, 60]
    assert [target.name for target in problem.targets] == ["top_left", "bottom_right"]
    assert problem.targets[0].classes == problem.targets[1].classes
    single = load_named(name, data_dir=DATA)
    for part, split in problem.splits.items():
        # The edges that the other image does not reach tell which image it is, and its split.
        source = single.splits[part].inputs["images"].flatten(1)
        ids = single.splits[part].targets["class"]
        for corner, seen, rows in (
            ("top_left", split.inputs["images"][..., :28, :28], slice(0, 8)),
            ("bottom_right", split.inputs["images"][..., 8:, 8:], slice(20, 28)),
        ):
            strip = torch.zeros(28, 28, dtype=torch.bool)
            strip[rows] = strip[:, rows] = True
            for row in range(5):
                strip_of = seen[row].flatten()[strip.flatten()]
                (alike,) = (source[:, strip.flatten()] == strip_of).all(1).nonzero(as_tuple=True)
                # The whole image is at least as dark as what lies over it.
                alike = alike[(source[alike] <= seen[row].flatten()).all(1)]
                assert split.targets[corner][row] in ids[alike]


def test_the_full_size_is_that_of_the_paper():
    need("mnist")
    problem = multi_digits("mnist", data_dir=DATA)
    assert problem.train.inputs["images"].shape == (100_000, 1, 36, 36)
    assert (len(problem.validation), len(problem.test)) == (20_000, 20_000)
    left, right = problem.train.targets.values()
    for ids in (left, right):
        assert (ids.bincount() / 100_000 - 0.1).abs().max() < 0.02
    # Drawn independently: one says nothing of the other.
    assert abs((left == right).float().mean() - 0.1) < 0.01
    pixels = problem.train.inputs["images"][:20_000].float() / 255
    assert abs(pixels.mean() - problem.mean[0]) < 0.002


def test_the_seed_and_the_overlay_decide():
    need("mnist")
    few = {"counts": (50, 10, 10), "data_dir": DATA}
    one, again = (multi_digits("mnist", 1, **few).train for _ in range(2))
    assert torch.equal(one.inputs["images"], again.inputs["images"])
    other = multi_digits("mnist", 2, **few).train
    assert not torch.equal(one.inputs["images"], other.inputs["images"])
    added = multi_digits("mnist", 1, overlay="sum", **few).train
    assert torch.equal(one.targets["top_left"], added.targets["top_left"])
    assert (added.inputs["images"] >= one.inputs["images"]).all()
    assert not torch.equal(added.inputs["images"], one.inputs["images"])


def test_bad_input_is_named():
    need("adult")
    with pytest.raises(ValueError, match="adult holds no images to compose"):
        multi_digits("adult", data_dir=DATA)
    with pytest.raises(ValueError, match="counts are of train, validation and test"):
        multi_digits("mnist", counts=(5, 5), data_dir=DATA)
    one = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="overlay must be max or sum, got 'mean'"):
        compose(one, one, "mean")
