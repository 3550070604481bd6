"""Further pre-training and self-distillation: who teaches whom, from which weights, how dearly."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import asking
import pytest
import tiny
import torch
import transformers as T
from rows import Rows, encoder, labelled, moved, rows, same, upcycled
from torch.utils.data import TensorDataset

from moiety.adapt import encoders
from moiety.adapt.corpus import read_corpus
from moiety.adapt.encoders import Encoder
from moiety.adapt.labelled import read_labelled
from moiety.adapt.opening import open_course
from moiety.adapt.pretrain import further_pretrain, self_distill
from moiety.adapt.recipe import Recipe, adamw, checked
from moiety.adapt.rows import repeated
from moiety.train.state import read_state

KINDS = ("image", "text")
SHORT = {"steps": 4, "batch": 6, "lr": 1e-2, "checks": 2}


def state(encoder):
    return {name: value.clone() for name, value in encoder.model.state_dict().items()}


# -- what is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_weight_self_distillation_is_further_pretraining(kind):
    model, data = encoder(kind), rows(kind)
    further = further_pretrain(model, data, **SHORT, seed=2)
    none = self_distill(model, data, distill_weight=0.0, **SHORT, seed=2)
    assert same(state(none.encoder), state(further.encoder))
    assert not same(state(further.encoder), state(model))
    full = self_distill(model, data, **SHORT, seed=2)
    assert same(full.stages[0].state, further.stages[0].state)
    assert not same(state(full.encoder), state(further.encoder))


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_masked_term_the_decoder_is_untouched(kind):
    model = encoder(kind)
    made = self_distill(model, rows(kind), mae_weight=0.0, **SHORT).encoder
    before, after = model.groups(), made.groups()
    assert all(torch.equal(after.rest[name], p) for name, p in before.rest.items())
    assert any(not torch.equal(after.trunk[name], p) for name, p in before.trunk.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_of_a_round_teaches_the_next(kind):
    model, data = encoder(kind), rows(kind)
    two = self_distill(model, data, rounds=2, **SHORT)
    assert [stage.name for stage in two.stages] == ["further", "round-1", "round-2"]
    further, first, second = (stage.state for stage in two.stages)
    again = self_distill(model, data, teacher=first, **SHORT)
    assert [stage.name for stage in again.stages] == ["round-1"]
    assert same(again.stages[0].state, second)
    other = self_distill(model, data, teacher=further, **SHORT)
    assert same(other.stages[0].state, first)
    assert not same(first, second)


def test_every_student_starts_from_the_initial_weights():
    model, data = encoder("text"), rows("text")
    made = self_distill(model, data, rounds=2, held=rows("text", 8, seed=5), **SHORT)
    starts = [stage.history[0] for stage in made.stages]
    assert [line["distance"] for line in starts] == [0.0, 0.0, 0.0]
    assert len({line["target"] for line in starts}) == 1
    assert same(made.initial, state(model))
    assert all(stage.history[-1]["distance"] > 0 for stage in made.stages)


def test_a_heavy_second_term_brings_the_student_close_to_its_teacher():
    model, data = encoder("image"), rows("image")
    words = {"teacher": state(moved(model)), "steps": 30, "batch": 24, "lr": 3e-3, "checks": 30}
    line = self_distill(model, data, distill_weight=10.0, **words).history
    assert line[-1]["distill"] < 0.3 * line[1]["distill"]


@pytest.mark.parametrize(
    "other",
    [
        {"match": "hidden"},
        {"match": "prediction"},
        {"match": "weights"},
        {"match": "weights", "norm": "mars"},
        {"mae_weight": 0.3},
        {"distill_weight": 0.3},
        {"distill_every": 2},
        {"teacher": None},
        {"teacher": None, "teacher_steps": 2},
        {"rounds": 2},
        {"lr": 1e-3},
        {"weight_decay": 0.5},
        {"batch": 5},
        {"seed": 1},
        {"cache_dtype": "bfloat16"},
        {"precision": "bfloat16"},
    ],
    ids=str,
)
def test_every_option_changes_something(plain, other):
    model, data, words, made = plain
    assert not same(state(self_distill(model, data, **{**words, **other}).encoder), made)


@pytest.fixture(scope="module")
def plain():
    """A model, its data, settings, and what becomes of it."""
    torch.manual_seed(0)
    model, data = encoder("image"), rows("image", 12)
    words = {**SHORT, "steps": 3, "checks": 1, "teacher": state(moved(model))}
    return model, data, words, state(self_distill(model, data, **words).encoder)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_of_text_models_learns_from_itself(family):
    model = Encoder.load(tiny.FAMILIES[family](), processor=tiny.tokenizer())
    words = {**SHORT, "steps": 2, "checks": 1, "held": rows("text", 4, seed=3)}
    made = self_distill(model, rows("text", 12), **words)
    assert made.stages[1].online is None and made.history[-1]["distill"] > 0
    assert made.history[-1]["distance"] > 0


def test_cached_and_online_targets_lead_to_the_same_place():
    model, data = encoder("text"), rows("text")
    cached = self_distill(model, data, **SHORT)
    online = self_distill(model, data, cache=False, **SHORT)
    assert [s.online for s in cached.stages] == [None, None]
    assert [s.online for s in online.stages] == [None, "no cache is wanted"]
    for name, value in state(online.encoder).items():
        torch.testing.assert_close(state(cached.encoder)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "other", [{"cache": False}, {"cache_limit": 9}, {"cache_dtype": "float16"}]
)
def test_a_run_never_has_both_cached_and_online_targets(other, tmp_path, monkeypatch):
    monkeypatch.setattr("moiety.adapt.flight.TOLD", 0.0)
    model, words = encoder("text"), {**SHORT, "out": tmp_path}

    def stop(name, share):
        if name == "round-1" and share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        self_distill(model, rows("text"), tick=stop, **words)
    with pytest.raises(ValueError, match=f"was begun with {next(iter(other))} .* give the same"):
        self_distill(model, rows("text"), **words, **other)


# -- from seed and step alone --------------------------------------------------------------------


def test_weights_that_lie_otherwise_in_memory_go_on_where_they_were(tmp_path, monkeypatch):
    model, data = encoder("image"), rows("image")
    model.model.to(memory_format=torch.channels_last)
    assert not all(p.is_contiguous() for p in model.model.parameters())
    words = {"steps": 6, "batch": 6, "lr": 1e-2, "checks": 1}
    alone = further_pretrain(model, data, **words)
    monkeypatch.setattr("moiety.adapt.flight.TOLD", 0.0)

    def half(name, share):
        if share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        further_pretrain(model, data, out=tmp_path, tick=half, **words)
    again = further_pretrain(model, data, out=tmp_path, **words)
    assert same(alone.encoder.model.state_dict(), again.encoder.model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_and_leaves_the_world_alone(kind):
    model, data = encoder(kind), rows(kind)
    before, lots = state(model), torch.get_rng_state()
    one = further_pretrain(model, data, **SHORT, seed=1)
    assert same(state(model), before)
    assert torch.equal(torch.get_rng_state(), lots)
    torch.rand(7)
    two = further_pretrain(model, data, **SHORT, seed=1)
    assert same(one.stages[0].state, two.stages[0].state) and one.history == two.history


def test_the_recipe_is_that_of_the_digest():
    recipe = Recipe(steps=4, batch=2, lr=0.8)
    assert [recipe.rate(step) for step in range(4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    model = encoder("image")
    wide, thin = adamw(model, recipe).param_groups
    assert wide["betas"] == (0.9, 0.95) and wide["weight_decay"] == 0.01
    assert thin["weight_decay"] == 0.0 and {p.dim() for p in thin["params"]} == {1}
    trained = [p for p in model.model.parameters() if p.requires_grad]
    assert len(wide["params"]) + len(thin["params"]) == len(trained)
    assert [s for s in range(1, 11) if checked(s, steps=10, checks=3)] == [4, 7, 10]


def test_experts_are_trained_with_their_balance_losses_and_beside_the_teachers_routers():
    ends = []
    for balance, weight in ((0.0, 0.0), (1.0, 0.0), (0.0, 100.0)):
        torch.manual_seed(0)
        model = upcycled("text", balance)
        made = self_distill(model, rows("text"), match_routing=weight, **SHORT)
        assert "routing" in made.history[-1] or not weight
        ends.append(state(made.encoder))
    routers = [name for name in ends[0] if ".router." in name]
    for other in ends[1:]:
        assert not any(torch.equal(ends[0][name], other[name]) for name in routers)


# -- the cost --------------------------------------------------------------------------------------


def test_counted_flops_are_in_the_result():
    model, data = encoder("image"), rows("image")
    further = further_pretrain(model, data, **SHORT).flops
    assert further["total"] == 4 * further["further"] > 0
    words = {**SHORT, "steps": 8}  # twice the epochs after which a cache has cost what it saves
    cached = self_distill(model, data, **words).flops
    assert cached["further"] == further["further"]
    one = cached["build"] / 24 * 6  # the teacher's pass over one batch
    # The student's unmasked pass, forward and backward, is part of a cached step; the pixels need
    # no gradient, so that it is a little less than three passes.
    assert 2.8 * one < cached["cached"] - cached["further"] < 3 * one
    assert cached["online"] == cached["cached"] + one
    assert cached["total"] == 8 * cached["further"] + 8 * cached["cached"] + cached["build"]
    online = self_distill(model, data, cache=False, **words).flops
    assert online["total"] == 8 * online["further"] + 8 * online["online"] > cached["total"]
    half = self_distill(model, data, distill_every=2, **SHORT).flops
    assert half["cached"] == (cached["cached"] + cached["further"]) / 2


# -- data ------------------------------------------------------------------------------------------


def test_what_was_finished_comes_back_as_it_was_left(tmp_path):
    model = encoder("text")
    for run in (further_pretrain, self_distill):
        for _ in range(2):  # trained, then found
            made = run(model, rows("text"), out=tmp_path / run.__name__, **SHORT)
            assert not made.encoder.model.training


def test_a_teacher_that_is_asked_for_few_examples_keeps_none(tmp_path, caplog):
    caplog.set_level("INFO", "moiety.adapt")
    data, words = rows("text", 30), {**SHORT, "teacher": state(encoder("text"))}
    for steps, every, online in ((5, 1, False), (4, 1, True), (10, 2, False), (9, 2, True)):
        words |= {"steps": steps, "distill_every": every}
        made = self_distill(encoder("text"), data, **words)
        assert (made.stages[-1].online is not None) == online
    assert "it is asked for 24 of 30 examples" in caplog.text


def test_a_disk_without_room_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    words = {**SHORT, "steps": 6, "out": tmp_path / "out"}
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as patched:
        patched.setattr("moiety.adapt.cache.shutil.disk_usage", lambda _: full)
        with pytest.raises(ValueError, match="room for 10 bytes: make room, or set a cache_limit"):
            self_distill(encoder("text"), rows("text"), **words)
    assert not (tmp_path / "out" / "plan.json").exists()
    self_distill(encoder("text"), rows("text"), cache_limit=1000, **words)  # as was advised


def test_weights_of_another_model_are_no_teacher():
    with pytest.raises(ValueError, match=r"^teacher holds weights of another model: give those of"):
        self_distill(
            encoder("text"), rows("text"), teacher=encoder("image").model.state_dict(), **SHORT
        )


def test_from_a_folder_and_a_text_file(tmp_path):
    tiny.FAMILIES["bert"]().save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    (tmp_path / "new.txt").write_text("\n".join(tiny.texts(80)))
    (tmp_path / "old.txt").write_text("\n".join(tiny.texts(60, seed=4)))
    lines = [f"{text},{i % 2}" for i, text in enumerate(tiny.texts(60, seed=2))]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines]))
    words = {"source": tmp_path / "old.txt", "labelled": tmp_path / "train.csv"}
    heard = []
    made = self_distill(
        tmp_path / "bert",
        tmp_path / "new.txt",
        out=tmp_path / "out",
        tick=lambda stage, share: heard.append((stage, share)),
        **words,
        **{**SHORT, "steps": 12},
    )
    assert {"target", "source", "linear", "knn", "score", "distance"} <= set(made.history[-1])
    assert [stage for stage, share in heard if share == 1.0] == [
        "further",
        "round-1, cache",
        "round-1",
    ]
    lines = (tmp_path / "out" / "round-1" / "follow.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == made.history
    made.encoder.save(tmp_path / "adapted")
    loaded = type(made.encoder.model).from_pretrained(tmp_path / "adapted")
    assert same(loaded.state_dict(), state(made.encoder))


def test_it_tells_how_far_it_is_between_two_looks(monkeypatch):
    monkeypatch.setattr("moiety.adapt.flight.TOLD", 0.0)
    heard = []
    words = {**SHORT, "checks": 1, "tick": lambda _, share: heard.append(share)}
    further_pretrain(encoder("image"), rows("image"), **words)
    assert heard == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_test_split_is_never_opened(tmp_path):
    lines = [f"{text},{i % 2}" for i, text in enumerate(tiny.texts(60, seed=2))]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines]))
    (tmp_path / "test.csv").write_bytes(b"\x00\xff\xfe no table")
    model = encoder("text")
    made = self_distill(model, rows("text"), labelled=tmp_path, stop="probe", **SHORT)
    assert "score" in made.history[-1]
    with pytest.raises(ValueError, match=r"test\.csv"):  # had it been read
        read_labelled(tmp_path, model).test()


def test_what_is_looked_at_is_held_out_and_probes_see_the_training_split(tmp_path):
    for name, count in (("new", 80), ("old", 60)):
        (tmp_path / f"{name}.txt").write_text("\n".join(tiny.texts(count, seed=count)))
    model, home = encoder("text"), asking.tables(tmp_path / "labelled")
    options = {"source": tmp_path / "old.txt", "labelled": home}
    course = open_course(model, tmp_path / "new.txt", 0, None, options)
    for name, path in (("target", "new.txt"), ("source", "old.txt")):
        corpus, held = read_corpus(tmp_path / path, model), course.follow.held[name]
        assert len(held) == len(corpus.held) and not repeated(held, corpus.train).any()
    assert not repeated(course.follow.held["target"], course.rows).any()
    assert len(course.rows) == len(read_corpus(tmp_path / "new.txt", model).train)
    split = read_labelled(home, model)
    assert repeated(course.follow.labelled, split.train).all()
    assert not repeated(course.follow.labelled, split.validation).any()


def test_images_in_memory_have_a_part_held_out():
    data = TensorDataset(tiny.pictures(40))
    made = further_pretrain(tiny.vit_mae(), data, labelled=labelled("image"), **SHORT)
    assert {"target", "score"} <= set(made.history[-1])


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"lr": -1.0}, ValueError, "lr must be a positive number, got -1.0"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be 0 or more"),
        ({"stop": "loss"}, ValueError, "stop must be one of"),
        ({"stop": "probe"}, ValueError, "needs labelled training examples to probe on"),
        ({"processor": "x"}, ValueError, "an Encoder has its processor: leave processor out"),
        ({"precision": "int8"}, ValueError, "precision must be one of"),
        ({"rounds": 0}, ValueError, "rounds must be at least 1, got 0"),
        (
            {"cache_dtype": "int8"},
            ValueError,
            "cache_dtype must be one of float32, bfloat16, float16",
        ),
        ({"match": "logits"}, ValueError, "match must be one of"),
        ({"speed": 3}, TypeError, "there is no option speed; there are held, source"),
    ],
)
def test_bad_settings_are_refused_and_leave_a_folder_as_it_was(words, error, said, tmp_path):
    with pytest.raises(error, match=said):
        self_distill(encoder("image"), rows("image"), **{**SHORT, "out": tmp_path, **words})
    assert not (tmp_path / "plan.json").exists()


def test_a_folder_of_another_adaptation_is_refused(tmp_path):
    model, data = encoder("image"), rows("image")
    made = further_pretrain(model, data, out=tmp_path, **SHORT)
    again = further_pretrain(model, data, out=tmp_path, **SHORT)  # the same goes through
    assert same(state(again.encoder), state(made.encoder))
    with pytest.raises(ValueError, match=r"was begun with lr 0.01 \(now 0.5\): give the same, or"):
        further_pretrain(model, data, out=tmp_path, **{**SHORT, "lr": 0.5})
    with pytest.raises(ValueError, match=r"the examples have changed since .* was begun: "):
        further_pretrain(model, rows("image", seed=7), out=tmp_path, **SHORT)
    other = model.copy()  # with another decoder
    torch.nn.init.normal_(next(p for p in other.groups().rest.values() if p.requires_grad))
    assert other.weights_key() == model.weights_key()
    for another in (moved(model), other):
        with pytest.raises(ValueError, match="was begun with another model: give the same, or"):
            further_pretrain(another, data, out=tmp_path, **SHORT)
    with pytest.raises(ValueError, match="was begun with"):
        self_distill(model, data, out=tmp_path, **SHORT)


def test_a_model_of_other_heads_is_another_model_though_its_weights_are_the_same(tmp_path):
    model = encoder("text")
    config = T.RobertaConfig(**{**tiny.TEXT, "num_attention_heads": 4})
    other = Encoder.load(T.RobertaForMaskedLM(config), processor=tiny.tokenizer())
    other.model.load_state_dict(model.model.state_dict())
    further_pretrain(model, rows("text"), out=tmp_path, **SHORT)
    with pytest.raises(ValueError, match="was begun with another model"):
        further_pretrain(other, rows("text"), out=tmp_path, **SHORT)


@pytest.mark.parametrize(
    "other",
    [
        {"held": rows("text", 9)},
        {"source": rows("text", 8, seed=9)},
        {"labelled": labelled("text", seed=9)},
        {"labelled": Rows(labelled("text").items, 1 - labelled("text").labels)},
    ],
)
def test_what_is_looked_at_stays_what_it_was(tmp_path, other):
    words = {**SHORT, "out": tmp_path, "held": rows("text", 8), "source": rows("text", 8, seed=2)}
    words["labelled"] = labelled("text")
    model, data = encoder("text"), rows("text")
    further_pretrain(model, data, **words)
    with pytest.raises(ValueError, match=r"the examples have changed since .* was begun"):
        further_pretrain(model, data, **{**words, **other})


@pytest.mark.parametrize(
    "make", [lambda: encoder("image"), lambda: encoder("text"), lambda: upcycled("text")]
)
def test_flops_are_those_of_a_whole_batch(monkeypatch, make):
    model = make()
    data = rows(model.kind)
    few = self_distill(model, data, **{**SHORT, "steps": 1}).flops
    monkeypatch.setattr(encoders, "FEW", 99)
    assert few == pytest.approx(self_distill(model, data, **{**SHORT, "steps": 1}).flops)


def test_an_interrupt_between_two_steps_keeps_what_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr("moiety.adapt.flight.TOLD", 0.0)
    words = {**SHORT, "steps": 6, "checks": 1}
    model, data = encoder("text"), rows("text")
    alone = further_pretrain(model, data, **words)

    def tick(name, share):
        if share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        further_pretrain(model, data, out=tmp_path, tick=tick, **words)
    assert read_state(tmp_path / "further" / "latest.safetensors")["step"] == 3
    again = further_pretrain(model, data, out=tmp_path, **words)
    assert same(state(again.encoder), state(alone.encoder))


def test_rows_without_examples_or_labels_are_refused():
    with pytest.raises(ValueError, match="the data hold no example to train on"):
        further_pretrain(encoder("image"), Rows([]), **SHORT)
    with pytest.raises(ValueError, match="the rows to probe on have no labels"):
        further_pretrain(encoder("image"), rows("image"), labelled=rows("image"), **SHORT)


def test_a_loss_that_is_no_number_is_told():
    with pytest.raises(ValueError, match=r"no longer a number .* lower the learning rate"):
        further_pretrain(encoder("image"), rows("image"), **{**SHORT, "lr": 1e30})
    # The last step before a look breaks the weights, which probes cannot take.
    words = {**SHORT, "lr": 1e30, "checks": 4, "labelled": labelled("text")}
    with pytest.raises(ValueError, match=r"no longer a number .* lower the learning rate"):
        further_pretrain(encoder("text"), rows("text"), **words)


# -- killed ----------------------------------------------------------------------------------------

FEW = "warm:4 step:4 between chunk:2 taught:3 end"  # test_adapt_kills.py has the others
MANY = (
    "plan warm:3 warm:4 warm:5 warmed initial step:3 step:4 step:5 save save:2 saved saved:2 line "
    "final between chunk chunk:2 written cached taught:2 taught:3 taught:4 kept kept:2 rounds "
    "chunk:2 written cached taught:3 end end remove"
)


@pytest.mark.parametrize(
    ("steps", "places"), [(5, FEW), pytest.param(12, MANY, marks=pytest.mark.slow)]
)
def test_killed_at_any_moment_it_ends_as_if_it_had_been_left_alone(tmp_path, steps, places):
    """In the warm-up, stage 1, the build of a cache, stage 2, between rounds and at the end."""
    script = Path(__file__).with_name("killed_pretraining.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path), str(steps), places]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["survived"] == [], ran.stderr
    assert found["last"] == 0, ran.stderr
    assert found["differ"] == [] and found["files"] >= 11
