"""`robust/auxiliary`: attacks on the router's losses are made of those losses."""

import torch
from test_robust_routing_change import trial

from moiety.robust import Target, build_loss
from moiety.studies.robust import auxiliary, routed, zoo

study = auxiliary.study


def measured(trained, loss, x):
    with torch.no_grad():
        seen = Target(trained.model, watch="all")(x)
        return float(build_loss(loss)(seen, trained.y).double().mean())


def test_every_attack_raises_the_loss_it_is_named_after(tmp_path):
    trained = zoo.trained(trial(tmp_path, "pgd", of=study))
    for attack, loss in (
        ("pgd", "ce"),
        ("pgd-overload", "overload"),
        ("pgd + auxiliary", {"ce": 1.0, "auxiliary": 1.0}),
        ("pgd + overload", {"ce": 1.0, "overload": 1.0}),
    ):
        clean, one = routed.look(trained, attack, [16], 5)
        before, after = (measured(trained, loss, f.attacked.x) for f in (clean, one))
        assert after > before, attack


def test_crowding_tokens_drops_more_of_them_than_plain_pgd(tmp_path):
    trained = zoo.trained(trial(tmp_path, "pgd", of=study))
    plain, crowded = (routed.look(trained, a, [64], 10)[1] for a in ("pgd", "pgd-overload"))
    assert crowded.dropped > plain.dropped
    assert crowded.error < plain.error  # it knows no label


def test_an_arm_reports_every_metric_and_is_the_same_again(tmp_path):
    one, again = (auxiliary.run(trial(tmp_path, "pgd + overload", of=study)) for _ in range(2))
    assert one == again and one.keys() == study.metrics.keys()
    assert one["clean error"] <= one["error at 4/255"]


def test_each_pair_differs_in_the_loss_of_the_attack_alone():
    for claim in study.claims:
        a, b = ({**study.arms[arm]} for arm in (claim.a, claim.b))
        assert a.pop("attack") != b.pop("attack") and a == b
