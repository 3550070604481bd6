"""Every registered router passes the whole suite, and each deliberate mistake is found."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from broken import BROKEN

from moiety import describe, list_routers, register
from moiety.routing.registry import unregister
from moiety.testing import check_router, checks


@pytest.fixture
def broken(request):
    """Register a broken router for one test."""
    cls = request.param
    register(cls.__name__, paper="none", equation="none")(cls)
    yield cls
    unregister(cls.__name__)


@pytest.fixture
def quadratic():
    """Import the new router as a user's file would be, and take it out again."""
    module = importlib.import_module("new_router")
    yield module.Quadratic.name
    unregister(module.Quadratic.name)
    del sys.modules["new_router"]


@pytest.mark.parametrize("check", checks(), ids=str)
@pytest.mark.parametrize("name", list_routers())
def test_router(name, check):
    check(name)


@pytest.mark.parametrize("broken", BROKEN, indirect=True, ids=lambda cls: cls.__name__)
def test_a_broken_router_fails_the_right_check(broken):
    with pytest.raises(AssertionError) as failure:
        check_router(broken.__name__)
    assert str(failure.value).startswith(f"router {broken.__name__!r}")
    assert f"fails {broken.caught_by}: " in str(failure.value)


def test_a_new_router_inherits_the_whole_suite(quadratic):
    assert quadratic in list_routers("quad*")
    check_router(quadratic)


def test_a_new_router_fits_in_sixty_lines():
    lines = (Path(__file__).parent / "new_router.py").read_text().splitlines()
    assert len(lines) <= 60


def test_options_given_are_held_fixed():
    check_router("noisy-top-k", noise="learned", k=1, renormalise=False)


def test_checks_are_named_and_documented():
    names = [str(check) for check in checks()]
    assert len(set(names)) == len(names) >= 20
    assert all(check.doc.endswith(".") for check in checks())
    with pytest.raises(ValueError, match="not of 'attack'"):
        checks("attack")


def test_checks_leave_the_callers_random_numbers_alone():
    before = torch.get_rng_state()
    checks()[3]("top-k")
    assert torch.equal(before, torch.get_rng_state())


def test_every_router_is_built_for_a_single_expert():
    from moiety.testing.contract import Case

    refused = [name for name in list_routers() if Case(name, {}).build_for(1) is None]
    assert refused == []


def test_all_routers_are_described():
    assert len(list_routers()) == 17
    assert all(describe(name).options or "softmax" in name for name in list_routers())
