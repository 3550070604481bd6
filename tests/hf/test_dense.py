"""`to_dense`: the way back gives the dense model, and says what it cost."""

import copy

import pytest
import torch
import transformers
from torch import nn

from moiety import watch
from moiety.grow import grow
from moiety.hf.dense import to_dense
from moiety.hf.place import Mixed, Tap
from moiety.hf.probe import gap, make_probe
from moiety.hf.saving import load, save
from moiety.hf.upcycle import receipt, upcycle
from moiety.moe import MoE

SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def drawn(model):
    """Weights large enough that every part matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.eval()


def llama(**words):
    config = transformers.LlamaConfig(
        **{**SMALL, "intermediate_size": 24, "num_key_value_heads": 1, **words}
    )
    return drawn(transformers.LlamaForCausalLM(config))


def bert():
    config = transformers.BertConfig(**SMALL, intermediate_size=24, max_position_embeddings=32)
    return drawn(transformers.BertForMaskedLM(config))


def gpt2():
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return drawn(transformers.GPT2LMHeadModel(config))


def t5(**words):
    words = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, **words}
    config = transformers.T5Config(**words, num_heads=2)
    return drawn(transformers.T5ForConditionalGeneration(config))


def phi3():  # one inner map makes both halves
    words = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 1, "pad_token_id": 0}
    return drawn(transformers.Phi3ForCausalLM(transformers.Phi3Config(**words)))


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, activation="gelu")
    return drawn(nn.TransformerEncoder(layer, 2))


class Odd(nn.Module):
    """A block that fits no formula: three maps."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).tanh())


class Odds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mlp, self.last = nn.Linear(16, 16), Odd(), nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.mlp(self.first(x)))


MODELS = {
    "llama": llama,
    "llama with biases": lambda: llama(mlp_bias=True),
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "t5 gated": lambda: t5(feed_forward_proj="gated-gelu"),
    "phi3": phi3,
    "encoder": encoder,
    "odd": lambda: drawn(Odds()),
}


def probe_of(model):
    given = torch.randn(2, 5, 16) if not hasattr(model, "config") else None
    return make_probe(model, given)


def same_weights(a, b, tol=1e-6):
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tol, rtol=tol, msg=name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("init", ["copy", "split", "low-rank"])
@pytest.mark.parametrize("inplace", [False, True])
def test_right_after_upcycling_the_way_back_is_exact(name, init, inplace):
    model = MODELS[name]()
    if name == "odd" and init == "split":
        pytest.skip("no formula, nothing to split")
    probe = probe_of(model)
    mixed = upcycle(model, experts=4, k=2, init=init, probe=probe)
    kept = copy.deepcopy(mixed.state_dict())
    dense = to_dense(mixed, probe=probe, inplace=inplace)
    assert (dense is mixed) == inplace
    assert receipt(dense).gap <= 3e-6
    same_weights(dense, model)
    assert gap(probe.outputs(model), probe.outputs(dense)) <= 3e-6
    kinds = {type(m) for m in dense.modules()}
    assert not kinds & {Mixed, Tap, MoE}
    assert kinds == {type(m) for m in model.modules()}
    assert [p.requires_grad for p in dense.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    if not inplace:  # what was given still works, and shares no weight
        assert all(torch.equal(kept[k], v) for k, v in mixed.state_dict().items())
        assert any(isinstance(m, MoE) for m in mixed.modules())
        mine = {p.data_ptr() for p in dense.parameters()}
        assert not mine & {p.data_ptr() for p in mixed.parameters()}


@pytest.mark.parametrize("make", [llama, bert, gpt2, t5])
def test_transformers_alone_loads_what_is_saved(make, tmp_path):
    model = make()
    dense = to_dense(upcycle(model, experts=4, k=2))
    dense.save_pretrained(tmp_path)
    assert "moiety" not in (tmp_path / "config.json").read_text()
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    probe = probe_of(model)
    assert gap(probe.outputs(model), probe.outputs(loaded)) <= 3e-6


@pytest.mark.parametrize("loaded", [False, True])
def test_no_trace_is_left(loaded, tmp_path):
    model = llama()
    mixed = upcycle(model, experts=4, k=2, balance={"switch": 0.1})
    if loaded:
        save(mixed, tmp_path / "mixed")
        mixed = load(tmp_path / "mixed")
        model.save_pretrained(tmp_path / "dense")
        model = type(model).from_pretrained(tmp_path / "dense")
    dense = to_dense(mixed)
    for clean, other in zip(model.modules(), dense.modules(), strict=True):
        for word in vars(clean):
            if word.endswith(("_hooks", "_with_kwargs", "_always_called")):
                assert len(getattr(other, word)) == len(getattr(clean, word)), word
    assert set(vars(dense)) - set(vars(model)) == {"_moiety_receipt"}
    assert set(dense.config.to_dict()) == set(model.config.to_dict())
    dense.save_pretrained(tmp_path / "again")
    assert "moiety" not in (tmp_path / "again" / "config.json").read_text()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        losses = [float(m.train()(ids, labels=ids).loss) for m in (dense, model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # no balance loss in it


def test_the_fused_path_of_torch_is_restored():
    model = encoder()
    mixed = upcycle(model, experts=4, k=2, probe=torch.randn(2, 5, 16))
    assert mixed.layers[0].activation_relu_or_gelu == 0
    dense = to_dense(mixed, probe=torch.randn(2, 5, 16))
    assert dense.layers[0].activation_relu_or_gelu == model.layers[0].activation_relu_or_gelu == 2
    assert dense.use_nested_tensor == model.use_nested_tensor is True


# -- after training --------------------------------------------------------------------------------


def moved(model):
    """The same model with experts that differ."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in (m for m in model.modules() if isinstance(m, MoE)):
            for p in layer.experts.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def first_expert_stack(model):
    return next(m for m in model.modules() if isinstance(m, MoE)).experts


def test_average_is_the_mean_of_the_experts():
    mixed = moved(upcycle(llama(), experts=4, k=2))
    stack, dense = first_expert_stack(mixed), to_dense(mixed)
    mlp = dense.model.layers[0].mlp
    torch.testing.assert_close(mlp.gate_proj.weight, stack.w_in.mean(0)[:24])
    torch.testing.assert_close(mlp.up_proj.weight, stack.w_in.mean(0)[24:])
    torch.testing.assert_close(mlp.down_proj.weight, stack.w_out.mean(0))
    assert receipt(dense).gap > 1e-3


def test_split_parts_are_averaged_by_their_place():
    mixed = moved(upcycle(gpt2(), experts=4, k=2, init="split"))
    stack, mlp = first_expert_stack(mixed), to_dense(mixed).transformer.h[0].mlp
    part = (stack.w_in[1] + stack.w_in[3]) / 2  # the second half of the hidden units
    torch.testing.assert_close(mlp.c_fc.weight[:, 32:], part.t())
    torch.testing.assert_close(mlp.c_proj.weight[:32], (stack.w_out[0] + stack.w_out[2]).t() / 4)
    torch.testing.assert_close(mlp.c_proj.bias, stack.b_out.mean(0))


def test_most_used_and_usage_follow_the_routes():
    mixed = moved(upcycle(llama(), experts=4, k=1))
    with watch(mixed) as routes:
        mixed(torch.arange(40).view(2, 20))
    load = routes.load()["model.layers.0.mlp.moe"]
    stack = first_expert_stack(mixed)
    one = to_dense(mixed, by="most-used", routes=routes).model.layers[0].mlp
    assert torch.equal(one.down_proj.weight, stack.w_out[load.argmax()])
    mean = to_dense(mixed, by="usage", routes=routes).model.layers[0].mlp
    share = load / load.sum()
    torch.testing.assert_close(mean.down_proj.weight, torch.einsum("e,edf->df", share, stack.w_out))


def test_without_routes_the_probe_says_who_works():
    mixed = moved(upcycle(llama(), experts=4, k=1))
    probe = {"input_ids": torch.full((1, 8), 7)}  # one token: one expert
    with torch.no_grad():
        weights = [to_dense(mixed, by=by, probe=probe) for by in ("most-used", "usage")]
    for p, q in zip(*(m.parameters() for m in weights), strict=True):
        torch.testing.assert_close(p, q)
    assert receipt(weights[0]).gap <= 1e-5  # and that expert alone is the whole model here


def test_low_rank_leaves_its_base():
    model = llama()
    mixed = moved(upcycle(model, experts=4, k=2, init="low-rank", rank=2, frozen=False))
    dense = to_dense(mixed)
    base = first_expert_stack(mixed).base
    assert torch.equal(dense.model.layers[0].mlp.down_proj.weight, base.down_proj.weight)
    assert receipt(dense).gap > 1e-3
    assert "corrections are left out" in str(receipt(dense))


def test_modules_are_averaged():
    mixed = moved(upcycle(drawn(Odds()), experts=3, k=1, probe=torch.randn(2, 5, 16)))
    members = first_expert_stack(mixed).members
    dense = to_dense(mixed, probe=torch.randn(2, 5, 16))
    want = torch.stack([m.b.weight for m in members]).mean(0)
    torch.testing.assert_close(dense.mlp.b.weight, want)


def test_grown_experts_count_where_their_family_does():
    mixed = upcycle(gpt2(), experts=4, k=2, init="split")
    grow(mixed, parents=[1])
    grown = to_dense(mixed)
    assert receipt(grown).gap <= 3e-6


def test_half_precision_comes_back_to_the_bit():
    model = llama().bfloat16()
    dense = to_dense(upcycle(model, experts=3, k=2))
    same_weights(dense, model, tol=0)


def test_a_bias_that_the_dense_block_had_not_shows_in_the_gap():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

        def forward(self, x):
            return self.b(self.a(x).relu())

    probe = torch.randn(2, 5, 16)
    mixed = upcycle(nn.Sequential(nn.Linear(16, 16), Half()), experts=2, k=1, probe=probe)
    assert receipt(to_dense(mixed, probe=probe)).gap <= 3e-6
    nn.init.ones_(first_expert_stack(mixed).b_in)
    dense = to_dense(mixed, probe=probe)
    assert dense[1].a.bias is None
    assert receipt(dense).gap > 1e-2


def test_the_receipt_counts():
    model = llama()
    mixed = upcycle(model, experts=4, k=2)
    proof = receipt(to_dense(mixed))
    assert proof.parameters_before == receipt(mixed).parameters_after
    assert proof.parameters_after == receipt(mixed).parameters_before
    assert "2 blocks, dense again: by='average'" in str(proof)


def test_the_mode_stays():
    assert to_dense(upcycle(llama().train(), experts=2, k=1)).model.layers[0].mlp.training
    assert not to_dense(upcycle(llama(), experts=2, k=1)).model.layers[0].mlp.training


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({}, {"by": "best"}, "by must be one of average, usage, most-used"),
        ({}, {"routes": "any"}, "routes say which experts worked"),
        ({"init": "low-rank"}, {"by": "usage"}, "low-rank experts, of which only the base"),
    ],
)
def test_what_cannot_be_done_is_refused(change, words, said):
    mixed = upcycle(llama(), experts=2, k=1, **change)
    with pytest.raises(ValueError, match=said):
        to_dense(mixed, **words)


def test_a_dense_model_and_foreign_routes_are_refused():
    with pytest.raises(ValueError, match="no mixture that upcycle made"):
        to_dense(llama())
    one, other = upcycle(llama(), experts=2, k=1), upcycle(gpt2(), experts=2, k=1)
    with watch(other) as routes:
        other(torch.arange(8)[None])
    with pytest.raises(ValueError, match=r"routes hold no call of model.layers.0.mlp.moe"):
        to_dense(one, by="usage", routes=routes)


def test_learned_corrections_are_not_dropped_in_silence():
    model = upcycle(bert(), experts=2, k=1, init="low-rank")
    to_dense(model)  # as they started: nothing to lose
    moved(model)
    with pytest.warns(UserWarning, match="what the low-rank experts of .* have learned is left"):
        to_dense(model)
