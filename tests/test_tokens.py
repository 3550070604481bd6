"""The padding mask and token ids that a Hugging Face model is given reach its MoE layers."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from moiety import MoE, watch
from moiety.tokens import follow

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
IDS = torch.arange(12).view(3, 4) + 3
RIGHT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
LEFT = RIGHT.flip(1)


def layer(**options):
    options.setdefault("balance", {"switch": 0.01})
    return MoE("top-k", dim=16, hidden=24, experts=4, k=2, **options)


class Passed(nn.Module):
    """Takes its two arguments as a BERT output does, and returns the first."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden, residual):
        return self.norm(hidden + residual)


def put(model, names, make=layer):
    """Place an MoE layer at each name and let it follow the model."""
    layers = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        layers[name] = make()
        setattr(model.get_submodule(parent), last, layers[name])
    return follow(model, layers)


def llama(**options):
    config = LlamaConfig(**SMALL, num_attention_heads=2, pad_token_id=0, **options)
    model = LlamaForCausalLM(config)
    put(model, ["model.layers.0.mlp", "model.layers.1.mlp"])
    return model.eval()


def bert(**options):
    config = BertConfig(
        **SMALL, num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    for block in model.bert.encoder.layer:
        block.output = Passed(block.output.LayerNorm)
    put(model, [f"bert.encoder.layer.{i}.intermediate" for i in range(2)])
    return model.eval()


def t5():
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    put(model, [ENCODER, DECODER])
    return model.eval()


ENCODER = "encoder.block.0.layer.1.DenseReluDense"
DECODER = "decoder.block.0.layer.2.DenseReluDense"


def masks(model, *args, **kwargs):
    """The masks that the layers worked with, by layer, one a call."""
    with watch(model, keep="choice") as routes, torch.no_grad():
        model(*args, **kwargs)
    return {name: [r.mask for r in routes[name]] for name in routes.layers}


def every(found, want):
    assert found
    for name, calls in found.items():
        for mask in calls:
            assert torch.equal(mask, want.bool().flatten()), name


# -- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("mask", [RIGHT, LEFT, RIGHT.bool()])
def test_the_mask_reaches_every_layer(make, mask):
    model = make()
    every(masks(model, input_ids=IDS, attention_mask=mask), mask)
    every(masks(model, IDS, mask), mask)  # by position
    embeds = torch.randn(3, 4, 16)
    every(masks(model, inputs_embeds=embeds, attention_mask=mask), mask)


@pytest.mark.parametrize("make", [bert, llama])
def test_without_a_mask_all_is_real_also_after_a_call_with_one(make):
    model = make()
    masks(model, input_ids=IDS, attention_mask=RIGHT)
    found = masks(model, input_ids=IDS)
    assert all(m is None for calls in found.values() for m in calls)


def test_an_inner_model_called_alone_has_its_own_mask():
    model = llama()
    every(masks(model.model, input_ids=IDS, attention_mask=LEFT), LEFT)


def test_padding_changes_nothing_and_takes_no_slot():
    model = bert()
    other = torch.where(RIGHT.bool(), IDS, 31 - IDS)
    with watch(model) as routes, torch.no_grad():
        one = model(input_ids=IDS, attention_mask=RIGHT).logits
        two = model(input_ids=other, attention_mask=RIGHT).logits
    assert torch.equal(one[RIGHT.bool()], two[RIGHT.bool()])
    assert all(int(n.sum()) == 2 * 2 * int(RIGHT.sum()) for n in routes.load().values())


def test_each_stack_of_an_encoder_decoder_has_its_own_mask():
    model = t5()
    short, mask = IDS[:, :4], torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    found = masks(
        model, input_ids=IDS, attention_mask=RIGHT, decoder_input_ids=short,
        decoder_attention_mask=mask,
    )  # fmt: skip
    assert torch.equal(found[ENCODER][0], RIGHT.bool().flatten())
    assert torch.equal(found[DECODER][0], mask.bool().flatten())
    found = masks(model, input_ids=IDS, attention_mask=RIGHT, decoder_input_ids=short)
    assert found[DECODER] == [None]  # though the encoder's would fit
    found = masks(model, input_ids=IDS, decoder_input_ids=short, decoder_attention_mask=mask)
    assert found[ENCODER] == [None]


@pytest.mark.parametrize("make", [llama, t5])
def test_cached_generation_reads_the_last_columns(make):
    model = make()
    with watch(model, keep="choice") as routes:
        model.generate(
            IDS, attention_mask=LEFT, max_new_tokens=3, min_new_tokens=3, do_sample=False
        )
    calls = routes["layers.0.mlp" if make is llama else ENCODER]
    assert torch.equal(calls[0].mask, LEFT.bool().flatten())
    if make is llama:
        assert [int(r.tokens) for r in calls] == [12, 3, 3]
        assert all(bool(r.mask.all()) for r in calls[1:])
    else:
        assert all(r.mask is None for r in routes[DECODER])


def test_generation_with_a_cache_equals_generation_without():
    model = llama()
    options = {"attention_mask": LEFT, "max_new_tokens": 4, "do_sample": False}
    cached = model.generate(IDS, use_cache=True, **options)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **options))


class Wrapper(nn.Module):
    """Calls its layer as it is told to."""

    def __init__(self, call):
        super().__init__()
        self.moe, self.call = layer(), call
        follow(self, {"moe": self.moe})

    def forward(self, hidden_states, attention_mask=None):
        return self.call(self.moe, hidden_states)


def test_flat_states_fit_too():
    model = Wrapper(lambda moe, x: moe(x.flatten(0, 1)).view_as(x))
    every(masks(model, torch.randn(3, 4, 16), RIGHT), RIGHT)


def test_a_mask_given_to_the_layer_itself_stays():
    for call in (lambda moe, x: moe(x, LEFT), lambda moe, x: moe(x, mask=LEFT)):
        every(masks(Wrapper(call), torch.randn(3, 4, 16), RIGHT), LEFT)


# -- what does not fit -----------------------------------------------------------------------------


def test_a_mask_that_does_not_fit_warns_once():
    model = bert(chunk_size_feed_forward=2)
    with pytest.warns(UserWarning, match=r"\[3, 4\] does not fit the input \[3, 2, 16\]"):
        found = masks(model, input_ids=IDS, attention_mask=RIGHT)
    assert all(m is None for calls in found.values() for m in calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks(model, input_ids=IDS, attention_mask=RIGHT)


def test_a_mask_that_says_nothing_of_padding_warns():
    with pytest.warns(UserWarning, match=r"type torch\.float32: MoE layers want"):
        masks(bert(), input_ids=IDS, attention_mask=RIGHT.float())
    with pytest.warns(UserWarning, match=r"shape \[3, 1, 4, 4\]"):
        masks(llama(), input_ids=IDS, attention_mask=torch.zeros(3, 1, 4, 4))


def test_threads_of_data_parallel_are_refused():
    model = llama()
    model._is_replica = True
    with pytest.raises(RuntimeError, match="torchrun"):
        model(input_ids=IDS)


def test_a_failed_forward_leaves_nothing_behind():
    model = llama()
    with pytest.raises(IndexError):
        model(input_ids=IDS + 100, attention_mask=RIGHT)
    found = masks(model, input_ids=IDS)
    assert all(m is None for calls in found.values() for m in calls)
    every(masks(model.model, input_ids=IDS, attention_mask=LEFT), LEFT)


# -- ids -------------------------------------------------------------------------------------------


def test_ids_reach_a_router_that_reads_them():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=2))

    def hashed():
        return MoE("hash", dim=16, hidden=24, experts=4)

    put(model, ["model.layers.1.mlp"], hashed)
    with watch(model, keep="choice") as routes, torch.no_grad():
        model(input_ids=IDS, attention_mask=RIGHT)
        past = model(input_ids=IDS[:, :3], use_cache=True).past_key_values
        model(input_ids=IDS[:, 3:], past_key_values=past, attention_mask=torch.ones_like(IDS))
    full, _, last = (r.index.view(3, -1) for r in routes["model"])
    router = model.model.layers[1].mlp.router
    by_hand = router(torch.zeros(12, 16), ids=IDS.flatten()).index.view(3, 4)
    assert torch.equal(full, by_hand)
    assert torch.equal(last, by_hand[:, 3:])


# -- copies, compiled code, gradient checkpointing -------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_follows_itself(copied):
    model = llama()
    other = copied(model)
    every(masks(other, input_ids=IDS, attention_mask=LEFT), LEFT)
    assert torch.equal(
        other(input_ids=IDS, attention_mask=LEFT).logits,
        model(input_ids=IDS, attention_mask=LEFT).logits,
    )


def test_the_hooks_can_be_taken_off():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=2))
    for handle in put(model, ["model.layers.0.mlp"]):
        handle.remove()
    found = masks(model, input_ids=IDS, attention_mask=RIGHT)
    assert found["model.layers.0.mlp"] == [None]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_compiled_models_follow(backend, part):
    model = llama()
    want = [model(input_ids=IDS, attention_mask=m).logits for m in (RIGHT, LEFT)]
    torch._dynamo.reset()
    fast = model
    if part == "model":
        fast = torch.compile(model, backend=backend)
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0], backend=backend)
    for mask, logits in zip((RIGHT, LEFT), want):
        got = fast(input_ids=IDS, attention_mask=mask).logits
        assert torch.allclose(got[mask.bool()], logits[mask.bool()], atol=1e-5)
    torch._dynamo.reset()


def backward_of_two(model):
    """Two forwards with other masks, then the backward of both."""
    model.train()
    model.zero_grad()
    losses = []
    for mask in (RIGHT, LEFT):
        with watch(model) as routes:
            out = model(input_ids=IDS, attention_mask=mask).logits
            losses.append(out[mask.bool()].square().mean() + routes.loss())
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("make", [bert, llama])
def test_checkpointed_layers_see_the_mask_of_their_own_forward(make):
    model = make()
    plain, gradients = backward_of_two(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, repeated = backward_of_two(model)
    assert plain == again
    for a, b in zip(gradients, repeated):
        assert torch.allclose(a, b, atol=1e-7)


def test_a_part_checkpointed_by_hand_sees_its_mask_too():
    model = llama()
    _, gradients = backward_of_two(model)
    inner = model.model.layers[1].mlp
    plain = inner.__call__

    class By(nn.Module):
        def forward(self, x):
            return checkpoint(plain, x, use_reentrant=False)

    model.model.layers[1].mlp = By()
    model.model.layers[1].mlp.moe = inner
    _, repeated = backward_of_two(model)
    for a, b in zip(gradients, repeated):
        assert torch.allclose(a, b, atol=1e-7)


@pytest.mark.filterwarnings("ignore:the balance losses carry no gradient")
def test_lost_tokens_raise_instead_of_routing_padding():
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with watch(model) as routes:
        out = model(input_ids=IDS, attention_mask=RIGHT).logits
        routes.loss()
    with pytest.raises(RuntimeError, match=r"what model\.layers\.1\.mlp knew .* is lost"):
        out.sum().backward()
