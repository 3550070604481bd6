"""Colours of arms and verdicts stand out, and are told apart by those who see fewer colours.

Sight without one kind of cone follows Machado, Oliveira and Fernandes (2009), distances CIE 1976.
"""

import re
from itertools import combinations

import numpy as np
import pytest

from moiety.report.page import TEMPLATES

ARMS = [f"c{i}" for i in range(8)]
WORDS = ["holds", "reversed", "negligible", "undecided"]
SIGHT = {
    "all cones": np.eye(3),
    "no red": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def colours(scheme):
    """The variables of the style sheets in one scheme."""
    found = {}
    for name in ("style.css", "study.css"):
        light, dark = (TEMPLATES / name).read_text().split("@media screen and", 1)
        for text in [light, dark.split("\n}\n")[0]][: 1 if scheme == "light" else 2]:
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))
    return found


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """The ratio of WCAG 2."""
    dark, light = sorted(float(TO_XYZ[1] @ linear(c)) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


def lab(colour, sight):
    xyz = TO_XYZ @ np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_page(scheme):
    known = colours(scheme)
    assert min(contrast(known[name], known["paper"]) for name in ARMS) >= 3
    assert min(contrast(known[name], known["paper"]) for name in WORDS) >= 4.5  # text on them
    assert min(contrast(known[name], known["paper"]) for name in ("ink", "quiet")) >= 4.5


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_told_apart(scheme, sight):
    known = colours(scheme)
    for names in (ARMS, WORDS):
        for a, b in combinations(names, 2):
            distance = np.linalg.norm(lab(known[a], sight) - lab(known[b], sight))
            assert distance > 20, f"{a} and {b} look alike"
