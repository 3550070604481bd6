"""The page of an audit: every number is on it, in words that cannot be misread, and all escaped."""

import re
from itertools import pairwise

import pytest

import audited
from moiety.report import AuditPart, audit_page, routing_page
from moiety.report.audit import answers
from moiety.report.audit_routes import eps_axis, eps_text
from moiety.report.chart import HEIGHT, NEAR, TOP, WIDTH, Series, bars, lines
from moiety.robust import check_audit

EVIL = "</svg><script>alert(1)</script>&"


def text(html):
    """What a reader sees: no tags, no double spaces."""
    body = html.split("</style>")[1]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


@pytest.mark.parametrize(
    "make", [audited.result, audited.dense, audited.batch, audited.deep], ids=lambda f: f.__name__
)
def test_what_these_tests_show_is_a_result_of_an_audit(make):
    check_audit(make())


# -- the page --------------------------------------------------------------------------------------


def test_every_error_is_there_with_its_interval():
    page = text(audit_page(audited.result()))
    for name, errors in audited.ERRORS.items():
        row = " ".join(f"{error:.1%} {_interval(error)}" for error in errors)
        assert f"{name} {row}" in page
    assert f"union 4.0% {_interval(0.04)} 36.0%" in page
    assert "Error at ε 0 1/255 2/255 8/255 pgd" in page


def _interval(error):
    low, high = audited.wilson(error)
    return f"{100 * low:.1f}–{high:.1%}"


def test_the_answers_come_first():
    page = text(audit_page(audited.result()))
    said = answers(audited.result())
    assert (
        "93.0% of the answers are wrong at ε = 8/255 (apgd); all attacks together 95.0%"
        in (said["Under attack"])
    )
    assert "71% through the input at unchanged routes, 29% through changed" in said["Which door"]
    assert all(page.index(each) < page.index("Error against ε") for each in said.values())


def test_the_doors_are_told_size_by_size():
    page = text(audit_page(audited.result()))
    assert "Routes Routes and weights Error Error, choices frozen Error, weights too" in page
    assert "8/255 +4.100 +2.900 +1.200 +1.700 93.0% 85.0% 80.0%" in page


def test_a_loss_that_does_not_rise_has_no_door():
    found = audited.RESULT["attribution"] | {"total": [0.0, 0.0, 0.0, -0.1]}
    assert "does not rise" in answers(audited.result(attribution=found))["Which door"]


def test_a_part_that_takes_back_is_no_share():
    changed = {"input": [0.0, 0.8, 1.8, 4.5], "routes": [0.0, 0.0, -0.1, -0.4]}
    found = audited.result(attribution=audited.RESULT["attribution"] | changed)
    assert (
        "+4.5 through the input at unchanged routes, −0.4 through changed routes"
        in (answers(found)["Which door"])
    )


def test_a_norm_is_explained():
    assert (
        "Every value of an attacked example moves by at most ε (l∞) and stays between 0 and 1"
        in (text(audit_page(audited.result())))
    )
    threat = audited.RESULT["threat"] | {"norm": "l2", "bounds": None}
    assert "moves by a length of at most ε (l2)." in text(audit_page(audited.result(threat=threat)))


def test_one_attack_is_not_called_all_together():
    said = answers(audited.dense())["Under attack"]
    assert "wrong at ε = 8/255 (apgd; 95 % interval 88.6% to 95.8%)." in said


@pytest.mark.parametrize(("error", "told"), [(0.89, False), (0.9, True), (1.0, True)])
def test_a_model_that_guesses_is_told_before_its_attacks(error, told):
    clean = audited.RESULT["clean"] | {"error": error}
    said = answers(audited.result(clean=clean))["No attack"]
    assert ("no better than guessing among 10 classes" in said) == told
    assert said.startswith(f"{error:.1%} of the answers are wrong")


def test_masking_says_where_it_looked_and_what_was_transferred():
    seen = text(audit_page(audited.result()))
    assert "At ε = 8/255, on 64 examples, so that" in seen
    assert "on this one with its routes frozen" in seen
    assert "was made on another model." in text(audit_page(audited.dense()))
    assert "transferred" not in text(audit_page(audited.batch()))


def test_the_time_of_an_attack_is_among_its_settings():
    seen = text(audit_page(audited.result()))
    assert "Attack pgd steps 40, loss ce, rel stepsize 0.025, random start no, took 2.5 s" in seen


def test_routing_is_told_layer_by_layer():
    page = audit_page(audited.result())
    seen = text(page)
    assert "blocks.2.moe 0.0% 22.0% 30.0% 65.0%" in seen  # the change under pgd
    assert "below 10% 10–25%" in seen and "95% and more" in seen  # in the unit of the numbers
    assert "blocks.0.moe 0.0% none dead 11.0% dead: 0 11.0% dead: 0 11.0% dead: 0" in seen
    assert "Dead: expert 0 in blocks.0.moe" in seen
    loads = re.findall(r'<table class="loads">', page)
    assert len(loads) == 1 + len(audited.ERRORS)  # clean, and under each attack
    assert "no attack" not in seen  # where two clean runs agree, there is nothing to say


def test_a_dense_model_has_no_word_of_routing():
    page = text(audit_page(audited.dense()))
    assert not re.search(r"[Rr]outing|[Dd]ead|door|Lipschitz|union|together", page)
    assert "apgd 4.0%" in page


def test_a_batch_threat_model_is_loud_and_masking_is_told():
    page = audit_page(audited.batch())
    assert '<p class="threat batch"><strong>Batch threat model</strong> Groups of 8' in page
    assert "drops what exceeds the capacity of an expert)" in page
    seen = text(page)
    assert "Masked gradients: these errors are too low to be trusted" in seen
    assert "Random search fools more examples (61.0%) than APGD (42.0%)." in seen
    assert "No: gradients are masked" in seen
    assert "Transfer" not in seen  # there was none
    assert "no attack" in seen and " 8.0% 0.0% 12.0% " in seen  # the noise of a random router
    plain = audit_page(audited.result())
    assert 'class="threat batch"' not in plain and "No sign of masked gradients" in plain


def test_an_example_that_ran_alone_says_why():
    threat = audited.RESULT["threat"] | {"coupled": "expert choice over the batch"}
    seen = text(audit_page(audited.result(threat=threat)))
    assert "(expert choice over the batch), so that each was run alone" in seen


def test_many_layers_are_shades_not_lines():
    few, many = audit_page(audited.result()), audit_page(audited.deep())
    assert few.count('<svg class="chart"') == 2 + len(audited.ERRORS)
    assert many.count('<svg class="chart"') == 2
    assert '<details class="after" open>' in many and '<details class="after" open>' not in few


def test_texts_are_escaped_and_nothing_is_loaded():
    result = audited.result(command=EVIL)
    for where in ("attacks", "routing"):
        result[where] = {f"{EVIL}{name}": each for name, each in result[where].items()}
    for layer in result["routing"].values():
        layer["attacks"] = {f"{EVIL}{name}": each for name, each in layer["attacks"].items()}
    result["model"]["name"] = result["data"]["name"] = result["threat"]["coupled"] = EVIL
    result["attribution"]["attack"] = EVIL
    result["masking"]["reasons"] = [EVIL]
    page = audit_page(result)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#)', page)


def test_missing_numbers_are_dashes():
    result = audited.result()
    result["attacks"]["pgd"]["error"][1] = None
    result["attacks"]["pgd"]["loss"][3] = None
    result["routing"]["blocks.0.moe"]["attacks"]["pgd"]["change"][2] = None
    result["model"]["flops"] = None
    assert "pgd 4.0% 2.0–7.7% – " in text(audit_page(result))


def test_a_part_of_another_page():
    part = AuditPart(title="The audit <b>", summary="Of top-k.", result=audited.dense())
    about = {"title": "T", "summary": "", "rows": [], "columns": [], "loads": {}}
    page = routing_page(**about, settings={}, command="", audit=part)
    assert "The audit &lt;b&gt;" in page and page.count('<svg class="chart"') == 1
    assert "93.0% of the answers are wrong" in text(page)
    bare = routing_page(**about, settings={}, command="")
    assert "<svg" not in bare and ".chart" not in bare


# -- words and charts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eps", "said"),
    [(0, "0"), (8 / 255, "8/255"), (0.5, "0.5"), (1.0, "1"), (0.2, "0.2"), (0.03, "0.03")],
)
def test_sizes_are_written_as_people_do(eps, said):
    assert eps_text(eps) == said


def test_an_axis_is_in_steps_of_a_byte_where_all_are():
    assert eps_axis([0, 1 / 255, 8 / 255]) == ([0, 1, 8], "ε, in 1/255")
    assert eps_axis([0, 0.5]) == ([0, 0.5], "ε")
    assert eps_axis([0, 1.0, 2.0])[1] == "ε"  # of an l2 ball, say


def test_a_line_is_where_its_values_are():
    chart = lines("L", [Series("a", [0, 1, 2], [0.0, 0.5, 1.0])], across="x", top=1.0)
    (line,) = chart["series"]
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in line["path"].split()]
    assert x1 - x0 == x2 - x1 > 0 and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 == TOP and x2 < WIDTH
    assert [t for _, t in chart["y_ticks"]] == ["0%", "20%", "40%", "60%", "80%", "100%"]


def test_points_without_a_value_are_left_out_and_order_does_not_matter():
    chart = lines(
        "L", [Series("a", [2, 0, 1], [1.0, 0.0, None], [0.9, 0, 0], [1, 0.1, 0])], across="x"
    )
    marks = chart["series"][0]["marks"]
    assert [mark["text"] for mark in marks] == ["a: 0.0%", "a: 100.0%"]
    low, high = marks[1]["spread"]
    assert low > high  # down is more


def test_labels_of_ticks_do_not_touch():
    places = [0, 1, 2, 3, 100]
    chart = lines("L", [Series("a", places, [0.5] * 5)], across="x", top=1.0)
    shown = [x for x, label in chart["x_ticks"] if label]
    assert all(b - a >= NEAR for a, b in pairwise(shown))
    assert chart["x_ticks"][-1][1] == "100" and len(chart["x_ticks"]) == 5


def test_bars_stack_up_and_down():
    chart = bars("B", ["1", "2"], {"input": [1.0, 2.0], "routes": [0.5, -1.0]}, across="x")
    first, on_top, second, below = chart["blocks"]
    assert on_top["y"] + on_top["height"] == pytest.approx(first["y"], abs=0.2)
    assert below["y"] == pytest.approx(chart["zero"], abs=0.2)
    assert second["height"] == pytest.approx(2 * first["height"], abs=0.2)
    assert below["y"] + below["height"] < HEIGHT


def test_nothing_but_zeros_can_be_drawn():
    assert lines("L", [Series("a", [0], [0.0])], across="x")["series"][0]["path"]
    assert bars("B", ["0"], {"input": [0.0]}, across="x")["blocks"][0]["height"] == 0
