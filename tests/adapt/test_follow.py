"""What is seen at a checkpoint, and a training that stops in time."""

import pytest
import torch
from rows import Rows, encoder, labelled, moved, rows, same
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from moiety.adapt import follow as following
from moiety.adapt.encoders import Encoder, Masked, Represented
from moiety.adapt.follow import Follow, knn_probe, linear_probe
from moiety.adapt.pretrain import further_pretrain

KINDS = ("image", "text")


def state(encoder):
    return {name: value.clone() for name, value in encoder.model.state_dict().items()}


# -- held-out data and distances -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_fixed_once(kind):
    one = encoder(kind)
    follow = Follow(rows(kind, 70), rows(kind, 5, seed=9), labelled(kind), seed=4)
    one.model.train()
    seen = follow.look(one, state(one))
    torch.rand(3)  # whatever was drawn meanwhile
    assert follow.look(one, state(one)) == seen
    assert all(part.training for part in one.model.modules() if isinstance(part, nn.Dropout))
    assert seen["target"] != seen["source"]
    other = Follow(rows(kind, 70), seed=5).look(one, state(one))
    assert other["target"] != seen["target"]
    later = follow.look(moved(one), state(one))
    assert later["target"] != pytest.approx(seen["target"], rel=1e-4)


def test_the_held_out_loss_is_the_mean_over_examples(monkeypatch):
    monkeypatch.setattr(following, "step_seed", lambda seed, number: 0)
    one, data = encoder("image"), rows("image", 70)
    one.model.eval()
    draw = [torch.Generator().manual_seed(0) for _ in range(2)]
    total = 0.0
    for part, lots in zip(torch.arange(70).split(64), draw):
        batch = one.batch(data.take(part))
        total += len(part) * one.masked(batch, one.mask(batch, lots)).loss.item()
    assert Follow(data).look(one, state(one))["target"] == pytest.approx(total / 70, rel=1e-6)


def test_the_distance_from_the_initial_weights_in_all_and_by_layer():
    one = encoder("text")
    initial = state(one)
    away = Follow().look(one, initial)
    assert away["distance"] == 0.0 and set(away) == {"distance", "layers"}
    with torch.no_grad():
        one.trunk.encoder.layer[1].output.dense.weight[0, :4] += 0.5
    away = Follow().look(one, initial)
    assert away["distance"] == pytest.approx(1.0)
    assert {n: d for n, d in away["layers"].items() if d} == {"encoder.layer.1": pytest.approx(1.0)}


# -- probes --------------------------------------------------------------------------------------


def clouds(gap, count=40, classes=3):
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = gap * torch.eye(classes, 6, dtype=torch.float64)
    noise = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    return centres[labels] + noise, labels


def test_the_linear_probe_answers_every_example_from_the_others(monkeypatch):
    monkeypatch.setattr(following, "RIDGES", (0.1,))
    features, labels = clouds(1.5)
    x = (features - features.mean(0)) / features.std(0)
    right = 0
    for i in range(len(x)):  # one by one, by the normal equations
        rest = torch.arange(len(x)) != i
        a, y = x[rest], F.one_hot(labels)[rest].double()
        centre = a.mean(0)
        gram = (a - centre).T @ (a - centre) + 0.1 * len(x) * torch.eye(6)
        w = torch.linalg.solve(gram, (a - centre).T @ (y - y.mean(0)))
        right += int(((x[i] - centre) @ w + y.mean(0)).argmax() == labels[i])
    assert 0.5 < right / len(x) < 1
    assert linear_probe(features, labels) == pytest.approx(right / len(x))


def test_probes_see_what_is_there_and_nothing_else():
    for probe in (linear_probe, knn_probe):
        assert probe(*clouds(20.0)) == 1.0
        assert probe(*clouds(0.0)) < 0.6
    features, labels = clouds(20.0)
    # Neighbours are others: an example is not its own.
    assert knn_probe(features, torch.arange(len(labels)) // 20, k=1) < 0.8


def test_the_ridge_is_the_one_that_errs_least():
    """Beside thirty columns of noise only a large one leaves the three classes to be seen."""
    features, labels = clouds(1.5)
    noise = torch.randn(40, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = torch.cat([features, noise], 1)
    found = {}
    for ridge in following.RIDGES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(following, "RIDGES", (ridge,))
            found[ridge] = linear_probe(features, labels)
    assert linear_probe(features, labels) == found[1.0] > found[1e-4]


def test_neighbours_count_by_their_direction_from_the_mean():
    features, labels = clouds(3.0)
    assert knn_probe(features + 1000, labels) == knn_probe(features, labels) > 0.8
    # Two of a class side by side, two of another on either side behind them.
    at, far = torch.tensor([0.0, 5.0, 120.0, 240.0]).deg2rad(), torch.tensor([1.0, 1.0, 2.0, 2.0])
    features = torch.stack([at.cos() * far, at.sin() * far], 1)
    assert knn_probe(features, torch.tensor([0, 0, 1, 1]), k=3) == 0.5  # by their number alone: 0


def test_a_text_is_probed_by_the_mean_of_its_real_tokens():
    features = torch.tensor([[[1.0], [3.0], [99.0]]])
    seen = Represented(features, torch.tensor([[True, True, False]]))
    assert following.pooled(seen, "text").tolist() == [[2.0]]
    assert following.pooled(seen, "image").tolist() == [[1.0]]


def test_every_batch_of_held_out_rows_has_masks_of_its_own():
    one, drawn = encoder("image"), []
    real = one.mask
    one.mask = lambda batch, lots: drawn.append(real(batch, lots)) or drawn[-1]
    following.held_loss(one, rows("image", 128), 0)
    assert len(drawn) == 2 and not torch.equal(*drawn)


def test_probes_need_classes():
    with pytest.raises(ValueError, match="at least 4 labelled examples of 2 classes, got 6 of 1"):
        Follow(labelled=Rows(rows("image", 6).items, torch.zeros(6)))
    with pytest.raises(ValueError, match='stop="probe" needs labelled training examples'):
        further_pretrain(encoder("image"), rows("image"), steps=2, stop="probe")


# -- a training that hurts ----------------------------------------------------------------------


class Drowned(Encoder):
    """A planted model: features are a signal and noise, each times a weight that training raises.

    At first the signal grows the most, as a share; then it has reached its end, and the noise grows
    on until nothing is seen behind it.
    """

    kind = "image"

    def batch(self, rows):
        return {"pixel_values": rows}

    def mask(self, batch, generator):
        return torch.zeros(len(batch["pixel_values"]), 1)

    def masked(self, batch, mask):
        ends = torch.tensor([1.0, 10.0])
        gap = (self.model.base_model.weights - ends).square().sum()
        nothing = torch.zeros(len(mask), 1)
        return Masked(gap, nothing, nothing, nothing.bool())

    def represent(self, batch):
        scale = self.model.base_model.weights.repeat_interleave(torch.tensor([1, 8]))
        features = (batch["pixel_values"] * scale)[:, None]
        return Represented(features, torch.ones(features.shape[:2], dtype=torch.bool))

    def input_key(self):
        return "planted"


class Planted(nn.Module):
    base_model_prefix = "trunk"

    def __init__(self):
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.weights = nn.Parameter(torch.tensor([0.05, 0.3]))
        self.config = PreTrainedConfig()

    @property
    def base_model(self):
        return self.trunk


def planted():
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(60) % 2
    noise = torch.randn(60, 8, generator=draw)
    signal = torch.where(labels == 0, -3.0, 3.0)[:, None]
    return Drowned(Planted()), Rows(torch.cat([signal, noise], 1), labels)


def test_a_training_that_hurts_is_stopped_and_its_best_moment_kept(tmp_path):
    model, data = planted()
    words = {"steps": 200, "batch": 60, "lr": 0.05, "labelled": data, "checks": 20}
    to_the_end = further_pretrain(model, data, **words)
    scores = [line["score"] for line in to_the_end.history]
    best = max(range(len(scores)), key=scores.__getitem__)
    assert scores[best] > max(scores[0], scores[-1]) + 0.1  # the case is what it claims to be
    assert to_the_end.stages[0].kept == 200

    stopped = further_pretrain(model, data, **words, stop="probe", patience=3, out=tmp_path)
    (stage,) = stopped.stages
    assert stage.kept == stopped.history[best]["step"] == to_the_end.history[best]["step"]
    assert stage.steps == stopped.history[-1]["step"] == stopped.history[best + 3]["step"] < 200
    assert stopped.history == to_the_end.history[: best + 4]
    seen = Follow(labelled=data).look(stopped.encoder, stopped.initial)
    assert seen["score"] == scores[best]
    again = further_pretrain(model, data, **words, stop="probe", patience=3, out=tmp_path)
    assert same(again.stages[0].state, stage.state)  # read from the disk

    patient = further_pretrain(model, data, **words, stop="probe", patience=99)
    assert (patient.stages[0].steps, patient.stages[0].kept) == (200, stage.kept)
