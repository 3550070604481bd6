"""The page of a comparison of adaptations, from planted results."""

import dataclasses
import re

import pytest

from moiety.adapt.asked import Asked
from moiety.report.adapt import adapt_page, answers, difference_rows

EVIL = "</dd><script>alert(1)</script>&"
SCORES = {"fine-tune": 0.70, "further": 0.74, "self-distill": 0.80}


def line(step, shift=0.0):
    seen = {"step": step, "target": 3.0 - 0.01 * step + shift, "source": 2.0 + 0.01 * step}
    return {**seen, "distance": 0.1 * step, "linear": 0.6, "knn": 0.5, "score": 0.55}


def difference(a, b, effect, half, word):
    interval = [effect - half, effect + half]
    return {"a": a, "b": b, "effect": effect, "interval": interval, "margin": 0.01, "word": word}


def result(word="holds", best="self-distill", **asked):
    """What a comparison leaves, with three differences of one verdict."""
    given = {"model": "models/roberta", "unlabelled": "papers.txt", "labelled": "citations"}
    words = Asked(**{**given, "method": "compare", **asked})
    stage = {"steps": 20, "kept": 20, "online": None, "history": [line(0), line(10), line(20)]}
    found = {
        arm: [{"accuracy": mean, "macro_f1": mean - 0.1, "micro_f1": mean, "loss": 0.5}] * 5
        for arm, mean in SCORES.items()
    }
    judged = {
        "best": best,
        "reason": "undecided between fine-tune, further and self-distill; more seeds would tell",
        "means": SCORES,
        "intervals": {arm: [mean - 0.02, mean + 0.02] for arm, mean in SCORES.items()},
        "differences": [
            difference("further", "fine-tune", 0.04, 0.02, word),
            difference("self-distill", "fine-tune", 0.10, 0.02, word),
            difference("self-distill", "further", 0.06, 0.02, word),
        ],
        "metric": words.metric,
        "margin": 0.01,
        "seeds": 5,
        "examples": 139,
        "level": 0.95,
        "floor": 0.511,
    }
    return {
        "asked": dataclasses.asdict(words),
        "used": {"batch": 128, "lr": 2e-4, "tune_batch": 12},
        "model": {"kind": "text", "class": "RobertaForMaskedLM", "parameters": 5e6, "made": []},
        "data": {"train": 900, "labelled": {"classes": ["a", "b"]}},
        "stages": {"further": stage, "round-1": {**stage, "online": "it is too large"}},
        "flops": {},
        "split": "test",
        "labels": 200,
        "scores": found,
        "moved": {arm: [1.0] * 5 for arm in SCORES},
        "spent": {"fine-tune": 0.0, "further": 1e12, "self-distill": 3e12},
        "judgement": judged,
        "looks": 1,
        "repeated": 0,
        "command": "moiety adapt --method compare",
    }


def test_the_first_answer_names_the_best_arm_and_the_cost_is_said():
    said = answers(result())
    assert said["Which"] == "Self-distillation."
    assert said["How sure"] == "It is better than both others by more than 1 point."
    assert "1.00 TFLOPs" in said["Cost"] and "3.00 TFLOPs" in said["Cost"]


def test_settings_have_what_was_used_and_not_what_did_nothing():
    page = adapt_page(result())
    assert "--tune-batch" in page and "--warm-steps" not in page and "--patience" not in page
    assert "--cache" not in page  # which is no option


def test_further_looks_what_was_left_out_and_the_commonest_class_are_said():
    said = answers(result())
    assert said["Scores"].endswith("self-distillation 80.0%; the commonest class alone 51.1%.")
    assert "look" not in said["How sure"] and "left out" not in said["How sure"]
    said = answers({**result(), "looks": 3, "repeated": 52})["How sure"]
    assert "This is look 3 at the same scored examples" in said
    assert said.endswith("52 scored examples were left out: they are also training examples.")


def test_few_steps_are_said_to_be_few():
    assert "unlabelled rows" not in answers(result())["Cost"]
    few = result()
    few["data"]["train"] = 128 * few["asked"]["steps"] * 4
    assert "Each stage has 0.25 passes over the unlabelled rows" in answers(few)["Cost"]


def test_probes_are_drawn_closely_where_they_differ():
    def ticks(*scores):
        given = result()
        for stage in given["stages"].values():
            stage["history"] = [{**line, "score": s} for line, s in zip(stage["history"], scores)]
        chart = adapt_page(given).split("Probe by step")[1].split("</svg>")[0]
        return re.findall(r">(\d+%)</text>", chart)

    assert {"0%", "100%"} <= {*ticks(0.70, 0.71, 0.71)}
    assert "0%" not in ticks(0.60, 0.75, 0.7) and "60%" in ticks(0.60, 0.75, 0.7)


def test_losses_are_drawn_from_below_their_values_and_distances_from_zero():
    page = adapt_page(result())
    first = {
        title: re.findall(r'text-anchor="end">([^<]+)<', page.split(f"<h3>{title}")[1])[:1]
        for title in ("Masked loss, new domain", "Distance from the start")
    }
    assert first == {"Masked loss, new domain": ["2.8"], "Distance from the start": ["0"]}


def test_where_nothing_is_decided_the_page_says_so_and_shows_the_largest_difference():
    said = answers(result("undecided", None))
    assert said["Which"].startswith("Undecided between fine-tuning alone, further pre-training")
    assert "self-distillation − fine-tuning alone +10.00 points" in said["How sure"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("holds", "further pre-training is better by more than 1 point"),
        ("reversed", "fine-tuning alone is better by more than 1 point"),
        ("negligible", "less than 1 point apart"),
        ("undecided", "undecided"),
    ],
)
def test_every_verdict_is_in_words(word, said):
    row = difference_rows(result(word))[0]
    assert (row["word"], row["said"]) == (word, said)
    assert row["said"] in adapt_page(result(word))


def test_the_page_shows_what_was_followed_and_needs_nothing():
    page = adapt_page(result(labels=200))
    for text in (
        "Masked loss, old domain",
        "Distance from the start",
        "Self-distillation, round 1: the teacher ran at every step: it is too large.",
    ):
        assert text in page
    assert "which labelled examples were drawn" in page
    assert "which labelled examples were drawn" not in adapt_page(result())
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_metric_that_was_asked_for_leads_the_table():
    heads = [adapt_page(result(metric=m)).split("<thead>")[1] for m in ("accuracy", "macro_f1")]
    assert heads[0].index("Accuracy") < heads[0].index("Macro F1")
    assert heads[1].index("Macro F1") < heads[1].index("Accuracy")


def test_what_a_user_named_is_escaped():
    page = adapt_page(result(unlabelled=EVIL, text=EVIL))
    assert "<script" not in page and "&lt;script&gt;" in page
