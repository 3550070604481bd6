"""anytime/language: its text, its ledger, what its arms cost, and kills."""

import math
from pathlib import Path

import pytest
import torch

from moiety.anytime.base import Learner
from moiety.data.named import MissingData
from moiety.io import read_json
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.report import figures
from moiety.studies.anytime import language, language_models, pilot, text
from moiety.studies.anytime.language import BASE, HALF, LARGE, study
from moiety.studies.cosine.language import made_up

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "results"


def running(arm, folder, seed=0, **settings):
    own = {**language.SMOKE, **study.arms[arm], "save_every": 0.0, **settings}
    trial, store = Trial(study.name, arm, seed, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


def corpus(**settings):
    return text.corpus_of({**language.SMOKE, **settings}, CPU)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The metrics of an arm at the smallest scale, run once."""
    known = {}

    def run(arm):
        if arm not in known:
            known[arm] = language.run(running(arm, tmp_path_factory.mktemp("arm")))
        return known[arm]

    return run


# -- text ------------------------------------------------------------------------------------------


def test_targets_are_the_tokens_that_follow():
    data = corpus().batches[0].train
    flat = data.x.flatten()
    assert torch.equal(data.y.flatten()[:-1], flat[1:])
    assert data.x.shape == (16, 16)


def test_byte_pairs_are_learned_from_the_first_mega_batch_alone(monkeypatch):
    lines = made_up()
    order = text.shuffled(len(lines), text.SEED, 0).tensor_split(3)
    other = list(lines)
    for row in torch.cat(order[1:]).tolist():
        other[row] = b"quite other words stand here, zebra after zebra.\n"
    want = corpus()
    text._corpus.cache_clear()
    monkeypatch.setattr(text, "made_up", lambda: other)
    got = corpus()
    text._corpus.cache_clear()
    assert torch.equal(want.batches[0].train.x, got.batches[0].train.x)
    assert not torch.equal(want.batches[1].train.x, got.batches[1].train.x)
    assert got.test.x.unique().numel() > 5  # what was never seen is spelled


def test_parts_hold_whole_reviews_in_an_order_and_share_none(monkeypatch):
    lines = [f"review {number} ends.\n".encode() for number in range(60)]
    monkeypatch.setattr(text, "made_up", lambda: lines)
    words = {"sequences": 6, "validation": 1, "test": 6, "length": 8, "vocabulary": 270}
    made = []
    byte_pairs = text.byte_pairs
    monkeypatch.setattr(text, "byte_pairs", lambda *a: made.append(byte_pairs(*a)) or made[-1])
    text._corpus.cache_clear()
    got = corpus(**words)
    text._corpus.cache_clear()
    parts = [got.batches[0].train, got.batches[0].validation, got.batches[1].train, got.test]
    reviews = []
    for part in parts:
        tokens = [made[0].id_to_token(i) for i in part.x.flatten().tolist()]
        assert "[END]" in tokens
        whole = "".join(tokens).replace("Ġ", " ").split("[END]")[:-1]
        reviews.append({int(review.split()[1]) for review in whole})
    assert all(reviews)
    assert sum(map(len, reviews)) == len(set().union(*reviews))
    assert reviews[0] != set(range(len(reviews[0])))  # not the order of the file


def test_more_sequences_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"too few for 5000 sequences of 16: ask for fewer"):
        corpus(sequences=5000)


def test_a_missing_corpus_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MOIETY_DATA", str(tmp_path))
    with pytest.raises(MissingData, match=r"unsup40k.txt.xz is not here"):
        corpus(text="reviews", test=9)


# -- arms ------------------------------------------------------------------------------------------


def test_the_full_scale_is_the_one_asked_for():
    full = study.scale("full")
    sizes = {name: (s["depth"], s["dim"]) for name, s in full.settings["sizes"].items()}
    assert sizes == {BASE: (4, 256), LARGE: (6, 512)}
    wanted = {"batches": 4, "vocabulary": 4096, "length": 256, "text": "reviews"}
    assert {name: full.settings[name] for name in wanted} == wanted
    assert full.seeds >= 5
    assert full.settings["sequences"] % full.settings["batch"] == 0  # one graph serves all steps


def test_numbers_are_those_of_the_ledger(tmp_path):
    trial = running(f"{BASE} SM4", tmp_path)
    found = language.run(trial)
    rows = trial.curve.rows()
    assert [row["step"] for row in rows] == [1, 2]
    perplexities = [row["perplexity"] for row in rows]
    assert found[language.AVERAGE] == pytest.approx(sum(perplexities) / 2)
    assert [found["first"], found["last"]] == perplexities
    assert perplexities == pytest.approx([math.exp(row["loss"]) for row in rows])
    assert found[language.NATS] == pytest.approx(sum(row["loss"] for row in rows) / 2)
    assert found[language.AHEAD] == rows[-1]["loss"]
    assert found["gap"] is None


def test_a_large_model_is_ahead_after_the_first_mega_batch(found):
    large = found(f"{LARGE} SM4")
    assert large[language.AHEAD] == pytest.approx(math.log(large["first"]))


def test_an_ensemble_costs_two_models_and_with_half_the_passes_one(found):
    one, two, half = (found(f"{BASE} {kind}")["training"] for kind in ("SM4", "Ens4@2", HALF))
    assert two == pytest.approx(2 * one, rel=0.05)  # the capacity drops other tokens
    assert half == pytest.approx(one, rel=0.05)
    assert found(f"{BASE} Ens4@2")["parameters"] == 2 * found(f"{BASE} SM4")["parameters"]


def test_growth_costs_parameters_and_little_compute(found):
    one, grown, members = (found(f"{BASE} {kind}") for kind in ("SM4", "gMoE families", "gEns"))
    assert one["parameters"] < grown["parameters"] < members["parameters"]
    assert grown["memory"] < members["memory"]
    assert grown["training"] == pytest.approx(one["training"], rel=0.1)
    assert members["training"] == pytest.approx(one["training"], rel=0.05)
    assert grown["first"] == members["first"] == one["first"]
    assert grown["gap"] < 1e-6 < found(f"{BASE} gMoE rows")["gap"]


def test_claims_are_about_what_the_paper_says():
    quotes = [claim.quote for claim in study.claims if claim.tier == "proxy"]
    assert sum(quote == language.SIZE_FIRST for quote in quotes) == 7  # all base arms
    assert all(claim.margin == 0.01 for claim in study.claims)


def test_the_projected_time_counts_all_steps():
    told = pilot.tell_projected(study, 2, "smoke", "cpu")
    # A seed: (3 + 2 + 2 / 2 + 1 + 2) models × 2 phases × 2 steps.
    assert told.count("36 steps a seed") == 2
    assert told.endswith("min")


def test_a_rate_is_chosen_on_validation_without_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("MOIETY_COURSES", str(tmp_path))
    monkeypatch.setattr(Learner, "measure", None)
    small = {"dim": 16, "depth": 2, "heads": 2, "rates": [1e-9, 3e-3, 1e30]}
    own = {**language.SMOKE, **study.arms[f"{BASE} SM8"], "sizes": {BASE: small}}
    scores = language_models.scores_of(own, CPU)
    assert scores["0.003"] > scores["1e-09"] and scores["1e+30"] is None  # the loss is lost
    assert language_models.settled(own, CPU)["sizes"][BASE]["lr"] == 3e-3
    monkeypatch.setattr(language_models, "_scores", None)  # kept, for all arms of the size
    ensemble = {**own, **study.arms[f"{BASE} Ens4@2"]}
    assert language_models.settled(ensemble, CPU)["sizes"][BASE]["lr"] == 3e-3


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SM4", "Ens4@2", "gEns", "gMoE families", "gMoE rows"])
def test_a_killed_trial_goes_on_to_the_same_bits(kind, found, tmp_path):
    def die(share):
        if share > 0.7:
            raise KeyboardInterrupt

    first = running(f"{BASE} {kind}", tmp_path)
    first.tick = die
    with pytest.raises(KeyboardInterrupt):
        language.run(first)
    again = running(f"{BASE} {kind}", tmp_path)
    assert first.checkpoint.exists()
    ticks = []
    again.tick = ticks.append
    assert language.run(again) == found(f"{BASE} {kind}")
    assert min(ticks) > 0.5  # the first mega-batch was not trained on again
    assert len(again.curve.rows()) == 2


@pytest.mark.parametrize("name", ["language", "routers"])
def test_its_page_draws_what_came_of_it_against_training_and_memory(name):
    result = read_json(RESULTS / f"anytime-{name}.json")
    compute, memory = figures.costs(result)
    assert compute.layout["xaxis"]["title"]["text"] == result["metrics"]["training"]["label"]
    for cost, drawn in (("training", compute), ("memory", memory)):
        means = [
            [arm["metrics"][n]["mean"] for n in (cost, result["main"])] for arm in result["arms"]
        ]
        assert [[one["x"][0], one["y"][0]] for one in drawn.data] == means
