"""Contracts: the suite that every router, kind of experts and learner passes, for yours as well.

from moiety.testing import check_experts, check_learner, check_router, checks

check_router("my-router")                 # raises AssertionError: router, check, what was seen
check_experts(lambda experts, dim: MyExperts(experts, dim))
check_learner(lambda seed: MyLearner(make_model, seed=seed))

@pytest.mark.parametrize("check", checks(), ids=str)
def test_my_router(check):
    check("my-router")
"""

from .contract import Check
from .learner import check_learner
from .suite import check_experts, check_router, checks

__all__ = ["Check", "check_experts", "check_learner", "check_router", "checks"]
