"""Watch and replay on the MoE models that come with transformers, and losses a model takes."""

import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import moiety
from moiety import MoE, native, replay, watch
from moiety.watch import moe_layers

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
SIX = {**SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

IDS = torch.arange(15).view(3, 5) + 3
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
REAL = MASK.bool().flatten()


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIX, num_local_experts=6))


def olmoe():
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**SIX, num_experts=6))


def qwen2_moe():  # its shared expert has as many rows as there are experts
    shared = {"num_experts": 6, "shared_expert_intermediate_size": 6}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIX, **shared))


def qwen3_moe():
    config = hf.Qwen3MoeConfig(**SIX, num_experts=6, norm_topk_prob=True, head_dim=8)
    return hf.Qwen3MoeForCausalLM(config)


def deepseek_v3():
    config = hf.DeepseekV3Config(
        **SIX, n_routed_experts=6, n_group=2, topk_group=2, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    return hf.DeepseekV3ForCausalLM(config)


def gpt_oss():
    return hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, num_local_experts=6, head_dim=8,
                                                num_experts_per_tok=2))  # fmt: skip


def switch():
    config = hf.SwitchTransformersConfig(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2,
        num_heads=2, num_experts=6, expert_capacity=1, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.SwitchTransformersForConditionalGeneration(config)


# What a gate must be found to be: (function, renormalised, scale).
GATES = {
    mixtral: ("softmax", True, 1.0),
    olmoe: ("softmax", False, 1.0),
    qwen2_moe: ("softmax", False, 1.0),
    qwen3_moe: ("softmax", True, 1.0),
    deepseek_v3: ("sigmoid", True, 2.5),
    gpt_oss: ("softmax", True, 1.0),
    switch: ("softmax", False, 1.0),
}
TOP_K = [m for m in GATES if m is not switch]


def spread(make):
    """A tiny model whose routers tell tokens apart."""
    model = make().eval()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)
    return model


def inputs(model, ids=IDS, mask=MASK):
    given = {"input_ids": ids, "use_cache": False}
    if mask is not None:
        given["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :4]
    return given


def run(model, **options):
    with torch.no_grad():
        return model(**inputs(model, **options)).logits


def hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


# -- what is recorded ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", GATES)
def test_blocks_are_found_by_structure(make):
    found = native.blocks(make())
    assert len(found) == (1 if make is deepseek_v3 else 2)
    for name, block in found.items():
        assert block.path == f"{name}.experts"
        assert block.count == 6
        assert type(block.router).__name__.endswith("Router")


@pytest.mark.parametrize("make", TOP_K)
def test_the_record_is_what_the_gate_says_by_hand(make):
    model = spread(make)
    seen = {}
    for name, block in native.blocks(model).items():
        block.router.register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: (args[0], m.forward(args[0]))})
        )
    with watch(model, keep="all") as routes:
        run(model)
    assert routes.layers == list(seen)
    for name, (_, (logits, weight, index)) in seen.items():
        (routing,) = routes[name]
        assert torch.equal(routing.index, index)
        assert torch.equal(routing.weight, weight)
        assert torch.equal(routing.scores, logits)
        assert torch.equal(routing.mask, REAL)


@pytest.mark.parametrize("make", GATES)
def test_the_gate_is_found(make):
    model = spread(make)
    with watch(model, keep="all") as routes:
        run(model)
    gate, renormalise, scale = GATES[make]
    for name in routes.layers:
        (r,) = routes[name]
        assert torch.equal(r.gate, native.GATES[gate](r.scores))
        assert (r.renormalise, r.scale) == (renormalise, scale)


@pytest.mark.parametrize("make", TOP_K)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gate_is_found_in_other_precisions(make, dtype):
    model = spread(make).to(dtype)
    model.set_experts_implementation("eager")  # the kernel has no float64
    with watch(model, keep="all") as routes:
        run(model)
    gate, renormalise, scale = GATES[make]
    r = routes[routes.layers[-1]][0]
    assert torch.equal(r.gate, native.GATES[gate](r.scores))
    assert (r.renormalise, r.scale) == (renormalise, scale)


def test_a_gate_is_found_once_the_scores_tell():
    model = deepseek_v3().eval()
    router = model.model.layers[1].mlp.gate
    nn.init.zeros_(router.weight)
    with watch(model, keep="all") as routes:
        run(model)  # all gates give these weights
        nn.init.normal_(router.weight)
        run(model)
    assert torch.equal(routes["mlp"][1].gate, routes["mlp"][1].scores.sigmoid())


@pytest.mark.parametrize("make", TOP_K)
def test_load_counts_real_tokens_and_padding_is_counted_apart(make):
    model = spread(make)
    with watch(model, keep="choice") as routes:
        run(model)
        run(model, mask=None)
    for name, load in routes.load().items():
        masked, whole = routes[name]
        summary = routes.summary()[name]
        assert int(load.sum()) == 2 * (9 + 15)
        assert summary.tokens == 9 + 15
        # Of the first call's 15 tokens 6 are padding, and the second call has none.
        by_hand = torch.bincount(masked.index[~REAL].flatten(), minlength=6) / (2 * 30)
        assert summary.padding == pytest.approx(by_hand.tolist())
        assert sum(summary.padding) == pytest.approx(6 / 30)
        assert masked.load().sum() == 18
        assert whole.load().sum() == 30
        assert summary.entropy is not None


def test_our_own_layers_give_padding_nothing():
    layer = MoE("top-k", dim=8, hidden=8, experts=4, k=2)
    with watch(layer) as routes, torch.no_grad():
        layer(torch.randn(15, 8), mask=REAL)
    assert routes.summary()["moe"].padding == [0.0] * 4


def test_switch_drops_are_counted_by_sequence():
    model = spread(switch)
    block = native.blocks(model)["encoder.block.1.layer.1.mlp"]
    seen = []
    block.router.register_forward_hook(lambda m, args, out: seen.append(out))
    with watch(model, keep="all") as routes:
        run(model)
    one_hot, probs, logits = seen[0]
    if logits.shape[-1] != block.count:
        pytest.skip("the Switch of this older transformers drops nothing, whatever its capacity")
    (r,) = routes["encoder"]
    wanted, kept = logits.argmax(-1).flatten(), one_hot.any(-1).flatten()
    assert torch.equal(r.index[:, 0], wanted)
    assert torch.equal(r.active[:, 0], kept & REAL)
    assert torch.equal(r.dropped[:, 0], ~kept & REAL)
    assert torch.equal(r.weight[:, 0], probs.flatten())
    by_hand = 0
    for row, real in zip(wanted.view(3, 5), MASK.bool()):  # capacity: one token an expert
        by_hand += sum(bool(real[i]) and row[i] in row[:i] for i in range(5))
    assert by_hand > 0
    assert routes.summary()["encoder.block.1.layer.1.mlp"].drop_rate == pytest.approx(by_hand / 9)
    assert routes["decoder"][0].mask is None  # the encoder's mask is not the decoder's
    assert routes["decoder"][0].tokens == 12


class Silent(nn.Module):
    """A router that tells its choice and keeps its logits to itself, as Switch once did."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.classifier(x).softmax(-1).topk(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = Silent(), Doubling()

    def forward(self, x):
        weight, index = self.router(x)
        return self.experts(x, index, weight)


class Doubling(nn.Module):
    num_experts = 4

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, states, index, weight):
        return 2 * states


def test_logits_that_a_router_keeps_to_itself_are_heard_inside_it():
    block, x = Block(), torch.randn(9, 8)
    with watch(block, keep="all") as routes:
        block(x)
    (r,) = routes["moe"]
    assert torch.equal(r.scores, block.router.classifier(x))
    assert torch.allclose(r.gate, r.scores.softmax(-1))


@pytest.mark.parametrize("silent", [False, True])
def test_only_the_first_call_is_looked_into(monkeypatch, silent):
    looked = []
    look = native._are_ids
    monkeypatch.setattr(native, "_are_ids", lambda *given: looked.append(1) or look(*given))
    block = Block()
    if silent:  # no scores at all, so that no gate is ever found
        monkeypatch.setattr(native.Native, "speakers", [])
    with watch(block) as routes:
        for _ in range(3):
            block(torch.randn(9, 8))
    assert len(routes.records) == 3
    assert looked == [1]


# -- replay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["choice", "all"])
@pytest.mark.parametrize("make", GATES)
def test_replay_of_the_same_input_changes_nothing(make, keep):
    model = spread(make)
    plain = run(model)
    with watch(model, keep=keep) as routes:
        assert torch.equal(run(model), plain)
    with replay(model, routes):
        again = run(model)
    assert (again - plain).abs().max() <= 2e-6
    assert torch.equal(run(model), plain)


def test_padding_chooses_for_itself_in_a_replay():
    encoder = spread(switch).encoder
    given = {"input_ids": IDS, "attention_mask": MASK.flip(1)}  # padding comes first
    with watch(encoder, keep="choice") as routes:
        plain = encoder(**given).last_hidden_state
    assert sum(routes.summary()["block.1.layer.1.mlp"].padding) > 0
    with replay(encoder, routes):
        again = encoder(**given).last_hidden_state
    assert torch.allclose(again, plain, atol=1e-6)  # at padding as well


@pytest.mark.parametrize("make", GATES)
def test_replay_of_another_input_keeps_the_choice(make):
    model = spread(make)
    other = IDS.flip(0, 1)
    with watch(model, keep="choice") as routes:
        run(model)
    with watch(model, keep="all") as seen, replay(model, routes):
        replayed = run(model, ids=other)
    assert not torch.allclose(replayed, run(model, ids=other))
    gate, renormalise, scale = GATES[make]
    for name in routes.layers:
        (was,), (now,) = routes[name], seen[name]
        real = was.mask if was.mask is not None else torch.ones(was.tokens, dtype=torch.bool)
        worked = now.choice()[real]
        assert torch.equal(worked, was.choice()[real])
        live = native.GATES[gate](now.scores)[real] * worked
        if renormalise:
            live = live / live.sum(-1, keepdim=True)
        assert torch.allclose(now.dense()[real], live * scale, atol=1e-5)


@pytest.mark.parametrize("make", GATES)
def test_replay_of_another_input_with_the_recorded_weights(make):
    model = spread(make)
    with watch(model, keep="choice") as routes:
        run(model)
    with watch(model, keep="all") as seen, replay(model, routes, weights=True):
        run(model, ids=IDS.flip(0, 1))
    for name in routes.layers:
        (was,), (now,) = routes[name], seen[name]
        real = was.mask if was.mask is not None else torch.ones(was.tokens, dtype=torch.bool)
        assert torch.allclose(now.dense()[real], was.dense()[real], atol=1e-6)


def test_replayed_mixtral_by_hand():
    model = spread(mixtral)
    block = model.model.layers[0].mlp
    x, y = torch.randn(2, 1, 7, 16)
    with watch(block, keep="choice") as routes, torch.no_grad():
        block(x)
    with replay(block, routes), torch.no_grad():
        got = block(y)[0]
    choice = routes[routes.layers[0]][0].index
    want = torch.zeros(7, 16)
    for t in range(7):
        p = torch.softmax(block.gate.weight @ y[0, t], 0)[choice[t]]
        for weight, e in zip(p / p.sum(), choice[t]):
            a, b = (block.experts.gate_up_proj[e] @ y[0, t]).chunk(2)
            want[t] += weight * (block.experts.down_proj[e] @ (nn.functional.silu(a) * b))
    assert torch.allclose(got, want, atol=1e-5)


def test_an_unknown_gate_replays_the_recorded_weights():
    config = hf.PhimoeConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2)
    model = spread(lambda: hf.PhimoeForCausalLM(config))
    with watch(model, keep="all") as routes:
        run(model)
    assert all(routes[name][0].gate is None for name in routes.layers)
    assert all(s.entropy is None for s in routes.summary().values())
    with watch(model, keep="all") as seen, replay(model, routes):
        run(model, ids=IDS.flip(0))
    for name in routes.layers:
        assert torch.equal(seen[name][0].weight[REAL], routes[name][0].weight[REAL])


def test_more_calls_than_recorded_raise():
    model = spread(olmoe)
    with watch(model, keep="choice") as routes:
        run(model)
    with replay(model, routes):
        run(model)
        with pytest.raises(ValueError, match="called more often"):
            run(model)
    with replay(model, routes), pytest.raises(ValueError, match=r"choice of shape \[15, 2\]"):
        run(model, ids=IDS[:2], mask=None)


# -- models left as they were ----------------------------------------------------------------------


@pytest.mark.parametrize("make", GATES)
def test_hooks_are_gone_after_the_block(make):
    model = spread(make)
    before = hooks(model)
    with watch(model, keep="choice") as routes:
        assert hooks(model) != before
        run(model)
    assert hooks(model) == before
    with pytest.raises(ZeroDivisionError), replay(model, routes), watch(model):
        raise ZeroDivisionError
    assert hooks(model) == before


def test_nested_watches_each_see_all():
    model = spread(mixtral)
    with watch(model) as outer:
        run(model)
        with watch(model) as inner:
            run(model)
    assert [s.calls for s in outer.summary().values()] == [2, 2]
    assert [s.calls for s in inner.summary().values()] == [1, 1]


def test_checkpointed_calls_count_once():
    model = spread(mixtral).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with watch(model, keep="all") as routes:
        model(**inputs(model)).logits.sum().backward()
        later = model(**inputs(model)).logits.sum()
    later.backward()
    assert [s.calls for s in routes.summary().values()] == [2, 2]
    assert float(routes.loss()) == 0.0
    with replay(model, routes), pytest.raises(ValueError, match="gradient checkpointing repeats"):
        model(**inputs(model)).logits.sum().backward()


def test_recorded_weights_carry_a_gradient():
    model = spread(mixtral)
    with watch(model, keep="all") as routes:
        model(**inputs(model))
    moiety.balance.switch(routes["layers.0.mlp"][0]).backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


def test_native_and_own_layers_side_by_side():
    model = spread(mixtral)
    model.model.layers[1].mlp = MoE("top-k", dim=16, hidden=24, experts=3, k=1)
    with watch(model, keep="choice") as routes:
        plain = run(model)
    assert sorted(routes.layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert {n: len(load) for n, load in routes.load().items()} == {
        "model.layers.0.mlp": 6,
        "model.layers.1.mlp": 3,
    }
    with replay(model, routes):
        assert torch.allclose(run(model), plain, atol=1e-6)
    assert list(moe_layers(model)) == ["model.layers.1.mlp"]


def test_compiled_models_are_watched_too():
    torch._dynamo.reset()
    model = spread(mixtral)
    want = run(model)
    fast = torch.compile(model, backend="eager")
    for _ in range(2):  # compiled before, and again after a watch
        with torch.no_grad():
            assert torch.allclose(fast(**inputs(model)).logits, want, atol=1e-5)
            with watch(fast) as routes:
                fast(**inputs(model))
        assert {n: int(load.sum()) for n, load in routes.load().items()} == {
            "model.layers.0.mlp": 18,
            "model.layers.1.mlp": 18,
        }
    torch._dynamo.reset()


def test_a_choice_that_cannot_be_read_is_refused():
    config = hf.NllbMoeConfig(
        vocab_size=32, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_sparse_step=2,
        decoder_sparse_step=2, num_experts=4,
    )  # fmt: skip
    model = hf.NllbMoeForConditionalGeneration(config).eval()
    with (
        watch(model),
        pytest.raises(ValueError, match=r"experts takes a choice of shape \[15, 4\]"),
    ):
        run(model)


def test_a_model_without_moe_layers_is_told_what_is_wanted():
    nothing = r"Linear has no MoE layer: neither a moiety\.MoE nor"
    with pytest.raises(ValueError, match=nothing), watch(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match=r"no moiety\.MoE layer; its own .*layers\.0\.mlp"):
        moiety.param_groups(mixtral())


# -- losses that a model adds itself ---------------------------------------------------------------


class Collector:
    collects = True

    def add(self, name, routing, terms):
        self.terms = terms


def balanced():
    return MoE("top-k", dim=8, hidden=8, experts=4, balance={"switch": 0.5})


def test_taken_losses_are_not_given_twice():
    layer = balanced()
    with watch(layer) as routes:
        layer(torch.randn(6, 8))
        waiting = routes.terms()
        routes.taken()
        assert routes.terms() == waiting
        with pytest.raises(ValueError, match=r"outputs\.loss already holds .* routes\.terms\(\)"):
            routes.loss()
        layer(torch.randn(6, 8))  # of this one nobody took the terms
        assert routes.loss().item() > 0
        assert routes.loss().item() == 0
        routes.taken()
        routes.clear()
        assert float(routes.loss()) == 0


def test_another_collector_keeps_the_warnings_quiet():
    layer = balanced()
    layer._watchers = (("moe", Collector()),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(6, 8))
        with watch(layer) as routes:
            layer(torch.randn(6, 8))
        del routes


def test_a_recorder_that_takes_no_losses_leaves_the_warning():
    layer, recorder = balanced(), Collector()
    recorder.collects = False
    layer._watchers = (("moe", recorder),)
    with pytest.warns(UserWarning, match="nothing collects them"):
        layer(torch.randn(6, 8))
    with watch(layer) as routes:
        layer(torch.randn(6, 8))
    with pytest.warns(UserWarning, match="never collected"):
        del routes
