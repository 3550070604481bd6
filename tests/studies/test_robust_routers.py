"""`robust/routers`: all attacks find what one finds, and no image couples to another."""

import pytest
import torch
from test_robust_routing_change import trial

from moiety.moe import MoE
from moiety.robust import coupled, named_attacks, run_attack
from moiety.robust.audit_attacks import check_router_attacks
from moiety.robust.target import Target
from moiety.studies.robust import routers, zoo

study = routers.study


@pytest.mark.parametrize("arm", study.arms)
def test_every_router_is_there_can_be_attacked_and_couples_no_images(arm, tmp_path):
    running = trial(tmp_path, arm, of=study, epochs=1)
    trained = zoo.trained(running)
    names = {m.router.name for m in trained.model.modules() if isinstance(m, MoE)}
    assert names == {arm}
    target = Target(trained.model)
    assert coupled(target, trained.x[:1]) is None
    attacks = named_attacks(running.settings["seeing"], 2)
    check_router_attacks(attacks, target, trained.x[:1])  # raises where the loss has no hold


def test_all_attacks_together_find_what_any_of_them_finds(tmp_path):
    running = trial(tmp_path, "top-k", of=study, steps=4)
    trained, nobody = zoo.trained(running), torch.zeros(32, dtype=torch.bool)
    union = routers.seeing_too(trained, nobody, routers.SEEING, 16, 4)
    one = run_attack(
        named_attacks(["apgd + overload"], 4)["apgd + overload"],
        trained.model,
        trained.x,
        trained.y,
        16 / 255,
        batch=zoo.BATCH,
    )
    assert bool((union | ~one.fooled).all())  # starts belong to an image, not to its batch
    before = torch.arange(32) < 20
    assert bool(routers.seeing_too(trained, before, routers.SEEING, 16, 4)[:20].all())
    everybody = torch.ones(32, dtype=torch.bool)
    assert bool(routers.seeing_too(trained, everybody, routers.SEEING, 16, 4).all())


def test_an_arm_reports_every_metric_and_errors_grow(tmp_path):
    found = routers.run(trial(tmp_path, "expert-choice", of=study))
    assert found.keys() == study.metrics.keys()
    assert found["clean error"] <= found["autopgd at 1/255"] <= found["error at 1/255"]
    assert found["error at 1/255"] - found["autopgd at 1/255"] == pytest.approx(
        found["only by the router at 1/255"]
    )


def test_each_router_stands_beside_top_k():
    assert {claim.a for claim in study.claims} | {"top-k"} == set(study.arms)
    assert {claim.b for claim in study.claims} == {"top-k"} and next(iter(study.arms)) == "top-k"
    trained = [{**arm, "router": "", "seeing": ""} for arm in study.arms.values()]
    assert all(arm == trained[0] for arm in trained)  # alike but for the router
