"""The digits: whole, in range, split by the seed alone."""

import pytest
import torch

from moiety.data import digits, to_patches


def test_shapes_range_and_classes():
    train, test = digits()
    x, y = train.tensors
    assert (x.shape, len(test)) == ((1347, 16, 4), 450)
    assert (x.dtype, float(x.min()), float(x.max())) == (torch.float32, 0.0, 1.0)
    for part in (train, test):
        share = part.tensors[1].bincount() / len(part)
        assert len(share) == 10
        assert (share - 0.1).abs().max() < 0.01
    assert y.dtype == torch.long


def test_the_seed_decides_the_split_and_no_image_is_lost():
    def test_images(seed):
        return digits(seed)[1].tensors[0]

    assert torch.equal(test_images(3), test_images(3))
    assert not torch.equal(test_images(3), test_images(4))
    totals = [sum(float(part.tensors[0].double().sum()) for part in digits(s)) for s in (3, 4)]
    assert totals[0] == totals[1]


def test_patches_are_squares_row_by_row():
    image = torch.arange(16.0).view(1, 4, 4)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert to_patches(image, 2)[0].tolist() == expected
    assert digits(patch=4)[0].tensors[0].shape[1:] == (4, 16)


@pytest.mark.parametrize("size", [0, 3])
def test_a_size_that_does_not_fit_raises(size):
    with pytest.raises(ValueError, match=f"4×4 pixels cannot be cut into {size}×{size}"):
        to_patches(torch.zeros(1, 4, 4), size)
