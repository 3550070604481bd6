"""Ensembles in one program with the models that need it: convolutions, batch norm, augmentation."""

import warnings

import pytest
import torch

from moiety.anytime.backbones import VGG19, crop_flip
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner

SGD = {"momentum": 0.9, "weight_decay": 1e-4}


def images(number, dtype, rows=40):
    g = torch.Generator().manual_seed(number)
    x, y = torch.randn(rows, 3, 32, 32, generator=g), torch.randint(10, (rows,), generator=g)
    x = (x + y[:, None, None, None] / 5).to(dtype)
    train, held = Examples(x[10:], y[10:]), Examples(x[:10], y[:10])
    return Phase(train=train, validation=held, number=number)


def ensemble(together, augment=crop_flip, *, dtype=torch.float64, device="cpu", phases=2):
    """In float64, since in float32 round-off grows through batch norm until a ReLU flips."""
    training = Training(
        method="sgd", options=SGD, batch=16, epochs=2, augment=augment, score="loss"
    )
    words = {"members": 2, "together": together, "device": device, "training": training}
    made = learner("ensemble", lambda seed: VGG19(2).to(dtype), **words)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fit_many trains")  # one after another on a CPU
        made.reports = [made.train(images(number + 1, dtype)) for number in range(phases)]
    return made


def assert_same(one, two, tolerance):
    """Weights, statistics of batch norm, and what was told."""
    for a, b in zip(one.models, two.models):
        for name, t in a.state_dict().items():
            other = b.state_dict()[name]
            torch.testing.assert_close(t, other, rtol=tolerance, atol=tolerance, msg=name)
    for a, b in zip(one.reports, two.reports):
        assert (a.steps, a.examples, a.flops) == (b.steps, b.examples, b.flops)
        assert a.validation == pytest.approx(b.validation, abs=tolerance)


def test_vgg19_with_shifted_and_mirrored_images_ends_as_its_members_alone():
    assert_same(ensemble(True), ensemble(False), 1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_step_is_captured_and_augments_with_its_own_numbers(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    words = {"dtype": torch.float32, "device": "cuda", "phases": 1}
    still, alone = (ensemble(together, None, **words) for together in (True, False))
    assert_same(still, alone, 1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph")
        moved, again = ensemble(True, **words), ensemble(True, **words)
    assert_same(moved, again, 1e-4)
    assert not torch.allclose(moved.models[0][-1].weight, still.models[0][-1].weight, atol=1e-4)
