"""A made-up result of an audit with all that a page can show (schema 1 of `moiety.robust`)."""

import copy
import math

EPS = [0.0, 1 / 255, 2 / 255, 8 / 255]
N, LAYERS, EXPERTS = 200, ["blocks.0.moe", "blocks.2.moe"], 8
ERRORS = {
    "pgd": [0.04, 0.31, 0.52, 0.88],
    "apgd": [0.04, 0.33, 0.56, 0.93],
    "apgd + router-margin": [0.04, 0.30, 0.55, 0.91],
}


def wilson(error):
    z, p = 1.96, error
    middle = (p + z * z / (2 * N)) / (1 + z * z / N)
    half = z / (1 + z * z / N) * math.sqrt(p * (1 - p) / N + z * z / (4 * N * N))
    return max(0.0, middle - half), min(1.0, middle + half)


def ends(errors):
    low, high = zip(*map(wilson, errors))
    return {"error": list(errors), "low": list(low), "high": list(high)}


def _attack(name, i):
    return {
        "settings": {"steps": 40, "loss": "ce", "rel_stepsize": 0.025, "random_start": False},
        **ends(ERRORS[name]),
        "loss": [0.12, 0.9 + 0.1 * i, 1.8, 4.2],
        "changed": [0.0, 0.29, 0.51, 0.9],
        "seconds": 2.5 + i,
    }


def _load(peak):
    rest = (1 - peak) / (EXPERTS - 1)
    return [peak if expert == 1 else rest for expert in range(EXPERTS)]


def _layer(i):
    hit = {
        name: {
            "change": [0.0, 0.12 + 0.1 * i + 0.02 * a, 0.2 + 0.1 * i, 0.45 + 0.2 * i],
            "load": [_load(0.14), _load(0.2), _load(0.3), [0.0, *_load(0.5)[1:]]],
            "dropped": [0.0, 0.01, 0.03, 0.11],
            "dead": [[], [], [], [0]],
        }
        for a, name in enumerate(ERRORS)
    }
    clean = {"load": _load(0.14), "dropped": 0.0, "dead": []}
    return {"experts": EXPERTS, "clean": clean, "attacks": hit}


RESULT = {
    "schema": 1,
    "kind": "audit",
    "command": "moiety audit --model vit --data digits --eps 0,1/255,2/255,8/255",
    "when": "2026-11-15T19:00:00+00:00",
    "machine": {"device": "cpu", "cores": 2, "threads": 1},
    "versions": {"moiety": "0.1.0", "torch": "2.13.0"},
    "model": {"name": "vit", "parameters": 181_690, "flops": 2.26e6, "layers": LAYERS},
    "data": {"name": "digits", "examples": N, "classes": 10},
    "threat": {
        "norm": "linf", "bounds": [0, 1], "group": 1, "label": "per example", "coupled": None,
    },
    "eps": EPS,
    "seed": 0,
    "clean": {"error": 0.04, "loss": 0.12},
    "attacks": {name: _attack(name, i) for i, name in enumerate(ERRORS)},
    "union": {**ends([0.04, 0.36, 0.6, 0.95]), "of": list(ERRORS)},
    "routing": {name: _layer(i) for i, name in enumerate(LAYERS)},
    "noise": {"error": 0.0, "change": dict.fromkeys(LAYERS, 0.0)},
    "attribution": {
        "attack": "apgd",
        "eps": EPS,
        "total": [0.0, 0.8, 1.7, 4.1],
        "input": [0.0, 0.7, 1.3, 2.9],
        "routes": [0.0, 0.1, 0.4, 1.2],
        "frozen": {
            "choices": {
                "error": [0.04, 0.28, 0.5, 0.85],
                "input": [0.0, 0.7, 1.3, 2.9],
                "routes": [0.0, 0.1, 0.4, 1.2],
            },
            "weights": {
                "error": [0.04, 0.25, 0.46, 0.8],
                "input": [0.0, 0.6, 1.1, 2.4],
                "routes": [0.0, 0.2, 0.6, 1.7],
            },
        },
    },
    "masking": {
        "flagged": False, "reasons": [], "random": 0.12, "transfer": 0.4, "strongest": 0.93,
        "examples": 64, "eps": EPS[-1],
    },
    "lipschitz": {
        "end_to_end": {"median": 12.3, "max": 40.1},
        "layers": {
            "blocks.0.moe": {"median": 1.2, "max": 3.4, "jump": 0.21},
            "blocks.2.moe": {"median": 2.1, "max": 5.0, "jump": None},
        },
    },
}  # fmt: skip


def result(**changes):
    """A copy with some values replaced."""
    return copy.deepcopy(RESULT) | copy.deepcopy(changes)


def dense():
    """Of a model without routing, under one attack."""
    attacks = {"apgd": RESULT["attacks"]["apgd"]}
    union = {**ends(ERRORS["apgd"]), "of": ["apgd"]}
    noise = {"error": 0.0, "change": {}}
    parts = {"routing": None, "attribution": None, "lipschitz": None}
    return result(attacks=attacks, union=union, noise=noise, **parts)


def batch():
    """Of groups of examples, of a model whose gradients are masked, with a random router."""
    threat = RESULT["threat"] | {"group": 8, "label": "batch threat model"}
    reasons = ["Random search fools more examples (61.0%) than APGD (42.0%)."]
    masking = RESULT["masking"] | {"flagged": True, "reasons": reasons}
    masking |= {"random": 0.61, "transfer": None, "strongest": 0.42}
    coupled = "blocks.0.moe drops what exceeds the capacity of an expert"
    noise = {"error": 0.01, "change": dict.fromkeys(LAYERS, 0.08)}
    return result(threat=threat | {"coupled": coupled}, masking=masking, noise=noise)


def deep():
    """Of a model with more layers than there are colours, and many experts."""
    layer = copy.deepcopy(RESULT["routing"][LAYERS[0]])
    for each in layer["attacks"].values():
        each |= {"load": [[1 / 64] * 64] * 4, "dead": [[]] * 4}
    layer |= {"experts": 64, "clean": layer["clean"] | {"load": [1 / 64] * 64}}
    names = [f"model.layers.{i}.mlp" for i in range(24)]
    return result(routing=dict.fromkeys(names, layer))
