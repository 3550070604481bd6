"""Adaptation of models whose routers count what they see: each stage, and a run that goes on,
begins where it should."""

import pytest
import torch
from rows import drawn, encoder, labelled, rows, same

import moiety
from moiety.adapt.encoders import Encoder
from moiety.adapt.finetune import finetune
from moiety.adapt.heads import warm_up
from moiety.adapt.objective import Objective
from moiety.adapt.pretrain import further_pretrain, self_distill
from moiety.adapt.teachers import frozen

SHORT = {"steps": 4, "batch": 6, "lr": 1e-3, "checks": 1}


class EndError(Exception):
    pass


def counting(kind="text", router="sigmoid-balanced", **more):
    """A tiny model with experts; a bias of the first router moves far."""
    made = encoder(kind)
    more = {"rate": 0.1} if router == "sigmoid-balanced" else more
    made.model = moiety.upcycle(made.model, experts=4, router=router, k=2, **more)
    return made


def routers(model):
    return [part.router for part in model.modules() if isinstance(part, moiety.MoE)]


def used(model):
    """The same, after it has seen a batch."""
    model.model.train()
    batch, masks = drawn(model, rows(model.kind))
    model.masked(batch, masks)
    assert all(router.seen.sum() for router in routers(model.trunk))
    return model


def left(run, folder, name):
    """What a run leaves that was broken off in a stage, and made again."""

    def tick(stage, share):
        if stage == name:
            raise EndError

    with pytest.raises(EndError):
        run(folder, tick=tick)
    return run(folder)


def test_a_router_that_has_counted_starts_every_stage_alike(tmp_path):
    model = used(counting())
    further = further_pretrain(model, rows("text"), **SHORT)
    none = self_distill(model, rows("text"), distill_weight=0.0, **SHORT)
    assert same(none.stages[1].state, further.stages[0].state)
    bias = [n for n in further.stages[0].state if n.endswith("router.bias")]
    assert any(further.stages[0].state[name].any() for name in bias)

    def run(folder, **more):
        return self_distill(
            model, rows("text"), out=tmp_path / folder, save_every=0.0, **SHORT, **more
        )

    alone, again = run("alone"), left(run, "ended", "round-1")
    assert all(same(a.state, b.state) for a, b in zip(alone.stages, again.stages))


def test_a_warm_up_leaves_the_counts_of_the_trunk_as_they_were(tmp_path):
    whole = counting()
    moiety.save(whole.trunk, tmp_path / "trunk")
    whole.processor.save_pretrained(tmp_path / "trunk")
    headless = Encoder.load(tmp_path / "trunk")
    before = {name: value.clone() for name, value in headless.trunk.state_dict().items()}
    assert headless.made
    warm_up(headless, rows("text"), steps=3, batch=6)
    assert same(headless.trunk.state_dict(), before)

    def run(folder, **more):
        words = {**SHORT, "warm_steps": 3, "save_every": 0.0, **more}
        return self_distill(
            Encoder.load(tmp_path / "trunk"), rows("text"), out=tmp_path / folder, **words
        )

    alone = run("alone")
    for stage in ("warm-up", "further"):
        again = left(run, f"ended in {stage}", stage)
        assert all(same(a.state, b.state) for a, b in zip(alone.stages, again.stages)), stage


@pytest.mark.parametrize("kind", ["text", "image"])
def test_the_distillation_pass_is_not_counted(kind):
    model = counting(kind)
    (batch, masks), teacher = drawn(model, rows(kind)), frozen(model.copy())
    model.model.train()

    def seen(**words):
        for router in routers(model.model):
            router.seen.zero_()
        objective = Objective(match="cls", **words)
        objective.backward(model, batch, masks, objective.target(teacher, batch, masks))
        return [int(router.seen.sum()) for router in routers(model.trunk)]

    FURTHER = Objective(distill_weight=0.0)
    for router in routers(model.model):
        router.seen.zero_()
    FURTHER.backward(model, batch, masks)
    masked = [int(router.seen.sum()) for router in routers(model.trunk)]
    assert seen() == masked and all(masked)
    assert all(seen(mae_weight=0.0))  # it is the only one


def test_a_schedule_of_calls_goes_on_once_a_step():
    model = counting(router="dselect-k")
    (batch, masks), teacher = drawn(model, rows("text")), frozen(model.copy())
    objective = Objective()
    model.model.train()
    objective.backward(model, batch, masks, objective.target(teacher, batch, masks))
    assert {int(router.calls) for router in routers(model.trunk)} == {1}
    grads = [p.grad for p in model.trunk.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)


def test_a_pass_that_is_run_again_by_the_backward_sees_what_the_first_one_saw():
    base = encoder("text")
    for part in base.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    torch.manual_seed(1)
    words = {"width": 1.0, "width_end": 0.01, "width_steps": 4, "k": 2}
    base.model = moiety.upcycle(
        base.model, experts=4, router="dselect-k", init="noise", exact=False, **words
    )
    batch, masks = drawn(base, rows("text"))
    target = Objective().target(frozen(base.copy()), batch, masks)
    target.values.add_(0.3)
    found = []
    for again in (False, True):
        student = base.copy()
        if again:
            student.model.gradient_checkpointing_enable()
        student.model.train()
        Objective().backward(student, batch, masks, target)
        assert {int(router.calls) for router in routers(student.model)} == {1}
        found.append({n: p.grad for n, p in student.model.named_parameters() if p.grad is not None})
    assert same(*found)


def test_the_noisy_pass_of_r3f_is_not_counted():
    model = counting(router="dselect-k")
    for method in ("plain", "r3f"):
        tuned = finetune(model, labelled("text"), method=method, steps=3, batch=8, lr=1e-3)
        assert {int(router.calls) for router in routers(tuned.classifier.model)} == {3}, method
