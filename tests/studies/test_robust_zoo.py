"""The models that the robustness studies share: trained once, found again, attacked alike."""

import functools
import itertools
import json
import math
import multiprocessing
import shutil

import pytest
import torch
from torch.nn import functional as F

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.moe import MoE
from moiety.robust import PGD, coupled
from moiety.robust.target import Target
from moiety.studies.robust import vision, zoo
from moiety.watch import watch

CPU = torch.device("cpu")
VIT, V_MOE = {"model": "vit"}, {"model": "v-moe", "experts": 8}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """A folder of models of its own."""
    monkeypatch.setenv("MOIETY_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def running(arm, folder, seed=0, **settings):
    own = {**zoo.SCALES["smoke"].settings, **arm, **settings}
    trial, store = Trial("robust/any", "any", seed, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


def built(**settings):
    """A model of the smallest scale, and images for it."""
    settings = {**zoo.SCALES["smoke"].settings, **settings}
    data = vision.pictures(settings, CPU)
    return vision.build(settings, seed=0, **data.facts).eval(), data.test.tensors[0][:20]


def same(one, other):
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(a == b and torch.equal(s, t) for (a, s), (b, t) in pairs)


# -- the models ----------------------------------------------------------------------------------


def test_patches_are_squares_of_the_image_row_by_row():
    model, _ = built(model="vit")
    seen = []
    model.trunk.register_forward_pre_hook(lambda _, words: seen.append(words[0]))
    images = torch.rand(2, 1, 8, 8)
    model(images)
    want = F.unfold((images - model.mean) / model.std, 2, stride=2).transpose(1, 2)
    assert torch.equal(seen[0], want)
    colour = vision.Vision(
        shape=(3, 8, 8), classes=5, mean=(0.1, 0.2, 0.3), std=(1, 2, 3), patch=4, dim=8, heads=2
    )
    colour.trunk.register_forward_pre_hook(lambda _, words: seen.append(words[0]))
    images = torch.rand(2, 3, 8, 8)
    assert colour(images).shape == (2, 5)
    want = F.unfold((images - colour.mean) / colour.std, 4, stride=4).transpose(1, 2)
    assert torch.equal(seen[-1], want)


def test_images_that_patches_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no patches of 3×3"):
        built(model="vit", patch=3)


@pytest.mark.parametrize("words", [{"model": "cnn"}, {**V_MOE, "router": "hash"}])
def test_what_is_not_here_is_named(words):
    with pytest.raises(ValueError, match=r"cnn.*v-moe|hash.*expert-choice"):
        built(**words)


def test_experts_are_in_every_second_block_and_start_alike():
    model, _ = built(**V_MOE, depth=5)
    kinds = [isinstance(block.feedforward, MoE) for block in model.trunk.blocks]
    assert kinds == [False, True, False, True, False]
    layer = model.trunk.blocks[1].feedforward
    w_in, w_out = layer.experts.stacks()
    assert (w_in == w_in[:1]).all() and (w_out == w_out[:1]).all()
    assert not torch.equal(w_in, model.trunk.blocks[3].feedforward.experts.stacks()[0])
    assert layer.group == "example"


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(64, 2, 32), (64, 2, 8), (16, 2, 8), (9, 1, 1)]
)
def test_an_expert_takes_what_v_moe_lets_it_take(tokens, k, experts):
    slots = math.ceil(tokens * k * 1.5 / experts)
    slots += -slots % 4
    factor = vision.capacity_factor(tokens, k, experts)
    layer = MoE("top-k", experts, dim=4, hidden=4, k=k, capacity_factor=factor, group="example")
    decision = layer.route(torch.ones(2 * tokens, 4), lead=(2, tokens))  # all want the same
    assert decision.load().max() == 2 * min(slots, tokens)


@pytest.mark.parametrize(
    ("experts", "losses"),
    [(2, {"gshard": 0.01}), (8, {"importance": 0.005, "load": 0.005})],
)
def test_the_router_of_v_moe_is_as_the_paper_has_it(experts, losses):
    model, _ = built(model="v-moe", experts=experts)
    layer = model.trunk.blocks[1].feedforward
    assert layer.balance == losses
    assert layer.router.k == 2 and layer.router.std == 1 / experts
    decision = layer.route(torch.randn(16, 16), lead=(1, 16))
    sums = decision.weight.sum(1)  # softmax over all experts, of which two are kept
    assert (sums < 0.99).all() == (experts > 2) and (sums <= 1 + 1e-6).all()


def test_one_expert_is_the_dense_part():
    model, x = built(model="v-moe", experts=1)
    plain, _ = built(model="vit")
    weights = dict(model.state_dict())
    for name in [name for name in weights if ".feedforward.experts." in name]:
        layer = {"w_in": "0.weight", "b_in": "0.bias", "w_out": "2.weight", "b_out": "2.bias"}
        start, last = name.split("experts.")
        weights[start + layer[last]] = weights[name][0]
    wanted = {name: weights[name] for name in plain.state_dict()}
    plain.load_state_dict(wanted)
    assert torch.allclose(model(x), plain(x), atol=1e-6)


@pytest.mark.parametrize("router", vision.ROUTERS)
def test_no_image_changes_the_answer_to_another(router):
    model, x = built(**V_MOE, router=router)
    assert torch.allclose(model(x)[:3], model(x[:3]), atol=1e-5)
    assert coupled(Target(model), x[:1], 1) is None
    with watch(model) as routes:
        model(x)
    (layer,) = routes.summary().values()
    assert len(layer.load) == 8


def test_the_larger_dense_model_costs_twice_as_much_and_v_moe_something_between():
    sizes = {"dim": 48, "depth": 4, "heads": 4, "patch": 2, "experts": 2}
    data = vision.pictures(zoo.SCALES["smoke"].settings, CPU)
    costs = [vision.flops(built(**sizes, model=m)[0], data.test) for m in ("vit", "vit++", "v-moe")]
    assert costs[1] / costs[0] == pytest.approx(17.9 / 8.9, rel=0.05)
    assert costs[2] / costs[0] == pytest.approx(12.4 / 8.9, rel=0.1)  # two experts drop nobody


def test_augmented_images_are_moved_and_mirrored_copies():
    x = torch.arange(1.0, 1 + 40 * 9).view(40, 1, 3, 3)
    assert vision.augment(x, 0) is x
    torch.manual_seed(0)
    found = vision.augment(x, 1)
    padded = F.pad(x, [1] * 4)
    shifts = list(itertools.product(range(3), range(3), (False, True)))
    seen = set()
    for image, wide in zip(found, padded):
        crops = {(r, c, m): wide[:, r : r + 3, c : c + 3] for r, c, m in shifts}
        crops = {k: crop.flip(-1) if k[2] else crop for k, crop in crops.items()}
        (which,) = [k for k, crop in crops.items() if torch.equal(image, crop)]
        seen.add(which)
    assert len(seen) > 10
    torch.manual_seed(0)
    assert torch.equal(vision.augment(x, 1), found)


# -- training ------------------------------------------------------------------------------------


def test_a_model_is_trained_once_and_found_again_bit_for_bit(tmp_path, models, monkeypatch):
    first = zoo.trained(running(V_MOE, tmp_path))
    monkeypatch.setattr(zoo, "train", None)  # nothing trains again
    run = running({**V_MOE, "router": "v-moe"}, tmp_path, images=7, steps=99)
    again = zoo.trained(run)
    assert same(first, again) and not again.model.training
    assert (again.clean, again.flops, again.curve) == (first.clean, first.flops, first.curve)
    assert len(again.x) == 7 and torch.equal(again.x, first.x[:7])
    assert run.extra == {"flops": first.flops, "parameters": first.parameters}
    (home,) = models.iterdir()
    about = json.loads((home / "model.json").read_text())
    assert about["spec"]["router"] == "noisy-top-k" and about["versions"]["torch"]
    assert not (home / "state").exists()


def test_what_training_depends_on_is_in_the_name():
    base = {**zoo.SCALES["smoke"].settings, **V_MOE}
    changes = [{"router": "top-k"}, {"experts": 4}, {"lr": 1e-3}, {"adversarial": True}]
    changes += [{"model": "vit"}, {"train": 64}, {"epochs": 2}, {"crop": 1}]
    names = [zoo.place(zoo.spec({**base, **change}, 0)) for change in [{}, *changes]]
    names.append(zoo.place(zoo.spec(base, 1)))
    assert len(set(names)) == len(names)
    for other in ({"images": 9}, {"grid": [1]}, {"steps": 9}, {"adversarial_steps": 9}):
        assert zoo.place(zoo.spec({**base, **other}, 0)) == names[0]
    dense = {**base, "model": "vit"}
    assert zoo.spec(dense, 0) == zoo.spec({**dense, "experts": 4, "router": "top-k"}, 0)


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "train", functools.partial(zoo.train, save_every=0.0))
    arm = {**V_MOE, "adversarial": True}  # both of its trainings are cut
    want = zoo.trained(running(arm, tmp_path / "whole", crop=1))
    shutil.rmtree(zoo.folder())

    def die(share):
        if share == 0.5:
            raise KeyboardInterrupt

    for _ in range(2):
        cut = running(arm, tmp_path / "cut", crop=1)
        cut.tick = die
        with pytest.raises(KeyboardInterrupt):
            zoo.trained(cut)
    found = zoo.trained(running(arm, tmp_path / "cut", crop=1))
    assert same(found, want) and found.curve == want.curve
    assert [row["step"] for row in found.curve] == [1, 2, 3, 4]


def _train(folder, log):
    usual = zoo.train

    def counted(*args, **words):
        with open(log, "a") as file:
            file.write("trained\n")
        return usual(*args, **words)

    zoo.train = counted
    zoo.trained(running(VIT, folder, train=512, epochs=4))


def test_of_two_processes_one_trains_and_the_other_waits(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    both = [context.Process(target=_train, args=(tmp_path / str(i), log)) for i in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "trained\n"


def test_adversarial_training_starts_from_the_standard_model(tmp_path, models):
    standard = zoo.trained(running(VIT, tmp_path))
    still = running({**VIT, "adversarial": True}, tmp_path, adversarial_epochs=2)
    tuned = zoo.trained(still)
    assert not same(tuned, standard)
    assert len(list(models.iterdir())) == 2
    gap = [(a - b).abs().max() for a, b in zip(*(t.model.parameters() for t in (tuned, standard)))]
    lr = still.settings["lr"] / 2
    steps = zoo.recipe(zoo.spec(still.settings, 0), 128).steps
    assert 0 < max(gap) < 2 * steps * lr  # Adam moves a weight by about lr a step at most


def test_adversarial_training_is_on_attacked_images(tmp_path, monkeypatch):
    asked = []

    def attack(target, x, y, **words):
        asked.append(words)
        return x

    monkeypatch.setattr(zoo, "attack_batch", attack)
    zoo.trained(running(VIT, tmp_path))
    assert not asked
    zoo.trained(running({**VIT, "adversarial": True}, tmp_path, adversarial_steps=4))
    assert asked == [{"eps": 8 / 255, "steps": 4}] * 4


def test_adversarial_training_makes_attacks_weaker(tmp_path):
    sizes = {"train": 640, "epochs": 6, "adversarial_epochs": 3, "images": 200, "steps": 10}
    found = {}
    for adversarial in (False, True):
        run = running({**VIT, "adversarial": adversarial}, tmp_path, **sizes)
        found[adversarial] = zoo.errors(zoo.trained(run), PGD(steps=10), [24], run)
    assert found[True]["clean error"] < 0.5
    gaps = [f["error at 24/255"] - f["clean error"] for f in (found[False], found[True])]
    assert gaps[1] < gaps[0]


def test_a_damaged_model_says_what_to_do(tmp_path, models):
    zoo.trained(running(VIT, tmp_path))
    (home,) = models.iterdir()
    (home / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="delete it, and it is trained again"):
        zoo.trained(running(VIT, tmp_path))


# -- attacks -------------------------------------------------------------------------------------


def test_the_attacked_images_are_the_same_for_all(tmp_path):
    one = zoo.trained(running(VIT, tmp_path, images=30))
    other = zoo.trained(running(V_MOE, tmp_path, seed=1, images=30))
    assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
    assert one.x.min() >= 0 and one.x.max() <= 1
    assert len(set(one.y.tolist())) > 5


def test_errors_are_those_of_the_attacked_images_by_eps(tmp_path):
    run = running(V_MOE, tmp_path, images=60, epochs=4)
    found = zoo.trained(run)
    errors = zoo.errors(found, PGD(steps=3), [0, 0.5, 8, 64], run)
    assert errors.keys() == zoo.EPS_METRICS([0, 0.5, 8, 64]).keys()
    wrong = (found.model(found.x).argmax(-1) != found.y).double().mean().item()
    assert errors["clean error"] == pytest.approx(wrong)
    at = [errors[name] for name in ("error at 0.5/255", "error at 8/255", "error at 64/255")]
    assert errors["clean error"] <= min(at) and at[-1] > errors["clean error"]
    assert errors["mean error"] == pytest.approx(sum(at) / 3)
    rows = run.curve.rows()
    assert [row["step"] for row in rows] == [0, 5, 80, 640]
    assert [row["error"] for row in rows] == [wrong, *at]
    assert zoo.errors(found, PGD(steps=3), [0.5, 8, 64], run) == errors


# -- scales --------------------------------------------------------------------------------------


def test_the_settings_of_a_study_lie_over_those_of_the_scales():
    found = zoo.scales(steps=100, smoke={"steps": 5, "images": 4})
    assert list(found) == ["smoke", "small", "full"]
    assert [scale.settings["steps"] for scale in found.values()] == [5, 100, 100]
    assert [scale.settings["images"] for scale in found.values()] == [4, 500, 2000]
    assert found["full"].settings["dim"] == zoo.SCALES["full"].settings["dim"]
    assert zoo.SCALES["smoke"].settings["steps"] == 3
    assert [scale.seeds for scale in found.values()] == [2, 5, 5]


@pytest.mark.parametrize(("folder", "found"), [("/a/b", "/a/b"), (None, "moiety/robust-models")])
def test_models_lie_where_the_environment_says(folder, found, monkeypatch):
    if folder is None:
        monkeypatch.delenv("MOIETY_MODELS")
    else:
        monkeypatch.setenv("MOIETY_MODELS", folder)
    assert str(zoo.folder()).endswith(found)
