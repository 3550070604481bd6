"""Trainings that take their steps together, beside each alone."""

import gc
import weakref

import pytest
import torch
from rows import encoder, labelled, moved, rows
from test_repeated import near, without_dropout
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from moiety.adapt import finetune, text
from moiety.adapt.pretrain import further_pretrain, self_distill
from moiety.adapt.together import Stack, together
from moiety.hf import upcycle
from moiety.train import transformer
from moiety.train.transformer import Stacked

SHORT = {"steps": 5, "batch": 6, "lr": 1e-3, "checks": 2}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def models(kind, device="cpu"):
    """Three of one structure, each with weights of its own."""
    found = [without_dropout(encoder(kind))]
    for _ in range(2):
        found.append(moved(found[-1].copy()))
    return [model.to(device) for model in found]


def alike(some, others, bound=5e-4):
    """To what Adam makes of the noise in gradients that are 0, as those of keys' biases are."""
    for one, other in zip(some, others, strict=True):
        assert near(one, other) < bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("way", ["further", slow("cls"), "hidden", "prediction", slow("weights")])
def test_every_adaptation_ends_as_it_would_alone(kind, way, device):
    three, data = models(kind, device), [rows(kind, 20 + 2 * i) for i in range(3)]

    def adapt(i, **more):
        words = {**SHORT, "seed": i, "capture": device == "cuda", **more}
        if way == "further":
            return further_pretrain(three[i], data[i], **words)
        teacher = {name: t.clone() for name, t in three[i - 1].model.state_dict().items()}
        return self_distill(three[i], data[i], teacher=teacher, match=way, **words)

    alone = [adapt(i) for i in range(3)]
    made = together([lambda crew, i=i: adapt(i, crew=crew) for i in range(3)])
    alike(*([one.stages[-1].state for one in each] for each in (alone, made)))
    for one, other in zip(alone, made):
        assert [line["step"] for line in one.history] == [line["step"] for line in other.history]
        for name in one.history[-1].keys() & {"masked", "distill", "distance"}:
            assert one.history[-1][name] == pytest.approx(other.history[-1][name], rel=1e-3)
    assert near(made[0].stages[-1].state, made[1].stages[-1].state) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("method", ["plain", slow("mars"), "recadam", "r3f"])
def test_every_fine_tune_ends_as_it_would_alone(kind, method, device):
    three, data = models(kind, device), labelled(kind)
    before = [model.weights_key() for model in three]

    def tune(i, **more):  # with rates of their own, and some are longer
        words = {"steps": (4, 8, 8)[i], "lr": (1e-3, 2e-3, 3e-3)[i], "batch": 8, "seed": i}
        words |= {"capture": device == "cuda", "validation": data, "method": method}
        words |= {"options": {"noise": 0.1, "weight": (0.3, 1, 3)[i]}} if method == "r3f" else {}
        return finetune(three[i], data, **words, **more)

    alone = [tune(i) for i in range(3)]
    made = together([lambda crew, i=i: tune(i, crew=crew) for i in range(3)])
    alike(*([one.classifier.model.state_dict() for one in each] for each in (alone, made)))
    for one, other in zip(alone, made):
        found = [each.scores["validation"]["loss"] for each in (one, other)]
        assert found[0] == pytest.approx(found[1], rel=1e-3)
        assert one.history[-1]["loss"] == pytest.approx(other.history[-1]["loss"], rel=1e-3)
    assert before == [model.weights_key() for model in three]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["tune", "distil"])
@pytest.mark.parametrize("kind", ["image", "text"])
def test_products_of_a_crew_are_in_bfloat16_where_that_is_asked(kind, way, device):
    three, seen = models(kind, device), set()

    def train(i, **more):
        words = {"steps": 5, "batch": 6, "lr": 1e-3, "seed": i, "precision": "bfloat16", **more}
        words["capture"] = device == "cuda"
        if way == "tune":
            tuned = finetune(three[i], labelled(kind), checks=1, **words)
            return tuned.history[-1]["loss"]
        data, teacher = rows(kind, 20), three[i - 1].model.state_dict()
        return self_distill(three[i], data, teacher=teacher, **words).history[-1]["masked"]

    product = torch.baddbmm

    def spy(*factors):
        made = product(*factors)
        seen.add(made.dtype)
        return made

    alone = [train(i) for i in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "baddbmm", spy)
        made = together([lambda crew, i=i: train(i, crew=crew) for i in range(3)])
    assert seen == {torch.bfloat16}
    assert made == pytest.approx(alone, rel=2e-2)


def test_the_same_again_is_the_same_to_the_bit():
    model = encoder("text")

    def tune(i, crew):
        return finetune(model, labelled("text"), steps=4, batch=8, seed=i, crew=crew)

    calls = [lambda crew, i=i: tune(i, crew) for i in range(3)]  # with dropout
    one, two = (
        [tuned.classifier.model.state_dict() for tuned in together(calls)] for _ in range(2)
    )
    assert all(torch.equal(a[n], b[n]) for a, b in zip(one, two) for n in a)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("router", "precision"),
    [
        ("cosine", "float32"),
        ("top-k", "bfloat16"),
        *(pytest.param(r, "float32", marks=pytest.mark.slow) for r in ("top-k", "softmax")),
    ],
)
@pytest.mark.parametrize("way", [slow("further"), slow("distil"), "routing", "tune"])
def test_mixtures_end_as_each_would_alone(way, router, precision, device, monkeypatch):
    monkeypatch.setattr(text, "ROUND", 1)
    three = [model.to("cpu") for model in models("text")]
    for seed, model in enumerate(three):
        torch.manual_seed(seed)
        options = {} if router == "softmax" else {"k": 2}
        words = {"experts": 4, "router": router, "balance": {"switch": 0.01}, **options}
        model.model = upcycle(model.model, **words)
    three = [model.to(device) for model in three]

    def train(i, **more):
        words = {**SHORT, "batch": 3, "seed": i, "capture": device == "cuda", **more}
        words["precision"] = precision
        if way == "tune":
            tuned = finetune(three[i], labelled("text", seed=i), **words)
            return tuned.classifier.model.state_dict()
        data = rows("text", 12, seed=i)
        if way == "further":
            return further_pretrain(three[i], data, **words).stages[-1].state
        words["match_routing"] = 1.0 if way == "routing" else 0.0
        teacher = {name: t.clone() for name, t in three[i - 1].model.state_dict().items()}
        return self_distill(three[i], data, teacher=teacher, **words).stages[-1].state

    alone = [train(i) for i in range(3)]
    made = together([lambda crew, i=i: train(i, crew=crew) for i in range(3)])
    alike(alone, made, bound=1e-3 if precision == "float32" else 0.02)


def test_routers_with_a_state_and_adapters_are_trained_alone():
    model = encoder("image")
    model.model = upcycle(model.model, experts=4, router="sigmoid-balanced", k=2)
    with pytest.raises(ValueError, match="counts in a state of its own"):
        together([lambda crew: further_pretrain(model, rows("image"), crew=crew, **SHORT)])
    model, words = encoder("text"), {**SHORT, "lora": 2}
    with pytest.raises(ValueError, match="LoRA is trained alone"):
        together([lambda crew: further_pretrain(model, rows("text"), crew=crew, **words)])


def test_what_cannot_be_together_is_refused_and_ends_all():
    small, large = encoder("image"), encoder("text")
    ended = []

    def further(model, kind, crew):
        try:
            return further_pretrain(model, rows(kind), crew=crew, **SHORT)
        finally:
            ended.append(kind)

    calls = [(small, "image"), (large, "text")]
    with pytest.raises(ValueError, match="of equal structure"):
        together([lambda crew, own=own: further(*own, crew) for own in calls])
    assert sorted(ended) == ["image", "text"]


def test_those_of_another_loss_are_apart():
    models_, data = models("image"), labelled("image")
    options = [{}, {"method": "r3f", "options": {"noise": 0.1}}, {}, {"steps": 9}]

    def tune(i, **more):
        words = {"steps": 5, "batch": 8, "lr": 1e-3, "seed": i, **options[i], **more}
        return finetune(models_[i % 3], data, **words).classifier.model.state_dict()

    made = together([lambda crew, i=i: tune(i, crew=crew) for i in range(4)])
    alike([tune(i) for i in range(4)], made)


def test_a_teacher_now_and_then():
    three, data = models("image"), rows("image")

    def adapt(i, **more):
        teacher, words = three[i - 1].model.state_dict(), {**SHORT, "seed": i, "distill_every": 2}
        return self_distill(three[i], data, teacher=teacher, **words, **more).stages[-1].state

    alike(
        [adapt(i) for i in range(3)],
        together([lambda crew, i=i: adapt(i, crew=crew) for i in range(3)]),
    )


def test_an_error_of_one_is_raised_and_the_others_end():
    ended = []

    def call(crew, i):
        try:
            data = labelled("image")
            tick = (lambda share: 1 / 0) if i == 1 else None
            return finetune(encoder("image"), data, steps=6, batch=8, tick=tick, crew=crew)
        finally:
            ended.append(i)

    with pytest.raises(ZeroDivisionError):
        together([lambda crew, i=i: call(crew, i) for i in range(3)])
    assert sorted(ended) == [0, 1, 2]


def test_results_of_calls_that_never_train():
    assert together([lambda crew, i=i: i * i for i in range(3)]) == [0, 1, 4]


@pytest.mark.parametrize("way", [slow("further"), "cls", slow("hidden"), "prediction", "r3f"])
def test_texts_of_other_lengths_are_padded(way, monkeypatch):
    monkeypatch.setattr(text, "ROUND", 1)
    three, longer = models("text"), []
    usual = text.TextEncoder.rounded

    def told(self, batch, length=None):
        longer.append(length is not None and length > batch["input_ids"].shape[1])
        return usual(self, batch, length)

    monkeypatch.setattr(text.TextEncoder, "rounded", told)

    def train(i, **more):
        words = {**SHORT, "batch": 3, "seed": i, **more}
        if way == "r3f":
            own = {"method": "r3f", "options": {"noise": 0.1}}
            tuned = finetune(three[i], labelled("text", seed=i), **words, **own)
            return tuned.classifier.model.state_dict()
        data = rows("text", 12, seed=i)
        if way == "further":
            return further_pretrain(three[i], data, **words).stages[-1].state
        teacher = {name: t.clone() for name, t in three[i - 1].model.state_dict().items()}
        return self_distill(three[i], data, teacher=teacher, match=way, **words).stages[-1].state

    alone = [train(i) for i in range(3)]
    alike(alone, together([lambda crew, i=i: train(i, crew=crew) for i in range(3)]))
    assert any(longer)


def test_nothing_is_left_behind(monkeypatch):
    kept, begin = [], Stack._begin
    monkeypatch.setattr(
        Stack, "_begin", lambda self, parts: kept.append(weakref.ref(self)) or begin(self, parts)
    )
    model, state = encoder("image"), torch.get_rng_state()
    gc.disable()
    try:
        calls = [lambda crew: further_pretrain(model, rows("image"), crew=crew, **SHORT)] * 2
        together(calls)
        assert kept[0]() is None  # without a collection of cycles
    finally:
        gc.enable()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_without_any_term_changes_nothing():
    model, data = encoder("image"), rows("image")
    words = {**SHORT, "mae_weight": 0.0, "distill_every": 2}
    teacher = moved(model.copy()).model.state_dict()

    def adapt(seed, **more):
        return self_distill(model, data, teacher=teacher, seed=seed, **words, **more)

    made = together([lambda crew, s=s: adapt(s, crew=crew) for s in range(2)])
    alike([adapt(s).stages[-1].state for s in range(2)], [one.stages[-1].state for one in made])


def stacked(one, *tensors):
    """A function of each of several copies, by the layers of a crew."""

    def inside(*tensors):
        with Stacked():
            return one(*tensors)

    return torch.func.vmap(inside, randomness="different")(*tensors)


def test_dropout_of_a_crew_leaves_out_other_numbers_in_each_copy():
    x = torch.ones(3, 4, 500, requires_grad=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = stacked(lambda x: F.dropout(x, 0.25), x)
    assert y.detach().unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(y.mean()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(y[0], y[1])
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, y)  # of a sum of ones, what was kept and how much it counts
    for words in ({"p": 0.0}, {"p": 0.5, "training": False}):
        assert torch.equal(stacked(lambda x, words=words: F.dropout(x, **words), x), x)


CHANGES = {  # of what was read, so that it must be cast again
    "mul_": lambda x: x.mul_(2),
    "+=": lambda x: x.__iadd__(1),
    "a view": lambda x: x[0].mul_(2),
    "relu": lambda x: F.relu(x, inplace=True),
    "dropout": lambda x: F.dropout(x, 0.5, inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_read_the_same_cast_it_once_and_again_when_it_changed(change, monkeypatch):
    x, weights = torch.randn(3, 4, 8), torch.randn(3, 3, 8, 8)
    casts, cast = [], Tensor.to

    def spy(tensor, *words, **more):
        if tensor.shape == x.shape[1:]:  # of one copy; weights are cast, too
            casts.append(tensor)
        return cast(tensor, *words, **more)

    def one(x, weights):
        x, each = x.clone(), weights.unbind()
        before = [F.linear(x, weight).view(2, 2, 8).transpose(0, 1) for weight in each]
        CHANGES[change](x)
        return before, x, F.linear(x, each[0])

    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(Tensor, "to", spy)
        before, changed, after = stacked(one, x, weights)
        monkeypatch.undo()
        wanted = [torch.bmm(x, weights[:, i].mT) for i in range(3)]
        wanted = [y.view(3, 2, 2, 8).transpose(1, 2) for y in wanted]
        wanted.append(torch.bmm(changed, weights[:, 0].mT))
    assert len(casts) == 2 and not torch.equal(x, changed)
    for found, known in zip((*before, after), wanted, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, known, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(("kind", "cut"), [("image", 1), ("text", 0)])
def test_weights_are_cast_once_for_all_layers(kind, cut, monkeypatch):
    three, seen, usual = models(kind), [], transformer._Products.forward

    def spy(ctx, x, w, b, half_w=None, half_b=None):
        seen.append(half_w is not None and torch.equal(half_w, w.to(torch.bfloat16)))
        return usual(ctx, x, w, b, half_w, half_b)

    monkeypatch.setattr(transformer._Products, "forward", staticmethod(spy))
    words = {**SHORT, "steps": 1, "batch": 3, "precision": "bfloat16"}
    together([lambda crew, m=m: further_pretrain(m, rows(kind), crew=crew, **words) for m in three])
    # Of an image's patches, which a convolution cuts, the weights have another shape.
    assert seen.count(False) == cut and seen.count(True) > 10


CONVOLUTIONS = {  # words, the size of the image, and whether it is done patch by patch
    "patches": ({"stride": 4}, 12, True),
    "in two": ({"stride": (4, 4)}, 12, True),
    "overlap": ({"stride": 2}, 12, False),
    "padding": ({"stride": 4, "padding": 2}, 12, False),
    "dilation": ({"stride": 4, "dilation": 2}, 12, False),
    "groups": ({"stride": 4, "groups": 3}, 12, False),
    "a rest": ({"stride": 4}, 14, False),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_of_a_crew_are_those_of_each_copy(case, monkeypatch):
    words, size, patching = CONVOLUTIONS[case]
    lots, calls = torch.Generator().manual_seed(0), []
    x = torch.randn(3, 2, 3, size, size, generator=lots)
    weight = torch.randn(3, 6, 3 // words.get("groups", 1), 4, 4, generator=lots)
    bias = torch.randn(3, 6, generator=lots)
    linear = Stacked.linear
    monkeypatch.setattr(Stacked, "linear", lambda *args: calls.append(args) or linear(*args))
    found = stacked(lambda *parts: F.conv2d(*parts, **words), x, weight, bias)
    known = [F.conv2d(*parts, **words) for parts in zip(x, weight, bias)]
    torch.testing.assert_close(found, torch.stack(known), atol=1e-4, rtol=1e-4)
    assert bool(calls) == patching


def test_kernels_of_attention_are_chosen_by_length_among_those_that_are_on():
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    for length, wanted in {17: [efficient], 65: [flash, efficient], 197: [efficient]}.items():
        assert transformer.attention_kernels(length) == [*wanted, SDPBackend.MATH]
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert transformer.attention_kernels(65) == [efficient, SDPBackend.MATH]
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.gpu
@gpu
def test_a_product_in_float32_is_rounded_once():
    lots = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(3, *s, generator=lots).to("cuda", torch.bfloat16) for s in ((9, 50), (50, 7))
    )
    found = transformer._product(a, b, torch.float32)
    torch.testing.assert_close(
        found.double(), torch.bmm(a.double(), b.double()), atol=1e-4, rtol=1e-5
    )
    assert found.is_contiguous() and found.dtype == torch.float32


@pytest.mark.parametrize("kind", ["image", "text"])
def test_attention_has_a_mask_where_there_is_padding_alone(kind, monkeypatch):
    three, masks, usual = models(kind), [], transformer._Attend.vmap

    def spy(info, dims, query, key, value, mask, *more):
        masks.append(mask)
        return usual(info, dims, query, key, value, mask, *more)

    monkeypatch.setattr(transformer._Attend, "vmap", staticmethod(spy))
    words = {**SHORT, "steps": 1, "batch": 3}
    together([lambda crew, m=m: further_pretrain(m, rows(kind), crew=crew, **words) for m in three])
    assert masks and all((mask is None) == (kind == "image") for mask in masks)


def test_a_layer_without_gradients_leaves_those_of_the_next_one():
    x = torch.randn(3, 4, 8, requires_grad=True)
    weights = torch.randn(3, 8, 8)

    def one(x, weight):
        with torch.no_grad():
            F.linear(x, weight)
        return F.linear(x, weight)

    with torch.autocast("cpu", torch.bfloat16):
        y = stacked(one, x, weights)
    assert torch.autograd.grad(y.float().sum(), x)[0].abs().sum() > 0


def test_layers_of_what_all_copies_share_are_plain_ones():
    constant, weight = torch.randn(4, 8), torch.randn(8, 8)

    def one(x):
        kept = F.dropout(torch.ones(500), 0.5)
        heads = constant.view(1, 2, 2, 8)
        seen = F.scaled_dot_product_attention(heads, heads, heads).sum()
        return x + F.linear(constant, weight).sum() + seen, kept, F.linear(x[None], x[None][0])

    found, kept, square = stacked(one, torch.arange(3.0)[:, None])
    assert torch.allclose(found[1] - found[0], torch.ones(1))
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(square.flatten(), torch.tensor([0.0, 1, 4]))


def test_several_weights_of_r3f_are_one_program(monkeypatch):
    (model, *_), data, update, sizes = models("image"), labelled("image"), Stack._update, []

    def spy(stack, places, tensors):
        sizes.append(len(places))
        return update(stack, places, tensors)

    monkeypatch.setattr(Stack, "_update", spy)
    words = {"steps": 3, "lr": 1e-2, "batch": 8, "seed": 0, "method": "r3f"}

    def tune(crew, weight):
        return finetune(model, data, options={"weight": weight, "noise": 1.0}, crew=crew, **words)

    made = together([lambda crew, w=w: tune(crew, w) for w in (0.1, 1.0, 10.0)])
    assert sizes == [3, 3, 3]
    states = [one.classifier.model.state_dict() for one in made]
    assert near(states[0], states[1]) > 1e-4 < near(states[1], states[2])
