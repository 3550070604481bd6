"""What self-distillation takes beside further pre-training, in time and in FLOPs.

    python benchmarks/adapt.py --device cuda --out results/adapt_gpu.json
    python benchmarks/adapt.py --model tiny-image --examples 128 --steps 4 --rounds 1
    python benchmarks/adapt.py --model minilm --precision bfloat16 --out results/adapt_cpu.json

For models with random weights and data without meaning, of the shapes that people adapt:

cached ÷ constant   a step with the teacher's representations out of the cache, and the same step
                    with targets that lie on the device: at most 1.05
time ÷ FLOPs        time of a cached step over that of further pre-training, over the same ratio of
                    counted FLOPs: at most 1.15
build ÷ pass        the time until the cache can be read, and one pass of the teacher over the same
                    examples: at most 1.1; a part of it is the teacher's name, a hash of its weights
ours ÷ transformers a step of further pre-training of text, and the same step by the loss of the
                    model's own class, whose head reads all places and not the hidden ones alone

Every round times each of them once, in turn; what counts is the median of the rounds. `--capture`
repeats steps as CUDA graphs; without it small models are bound by launches, whose number is not
their FLOPs. A file that is there already keeps what it has of other models.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moiety.adapt import Encoder, Objective, place_patches
from moiety.adapt.cache import batches, look_through
from moiety.adapt.course import Course
from moiety.adapt.encoders import Batch
from moiety.adapt.follow import Follow
from moiety.adapt.objective import Target
from moiety.adapt.recipe import Recipe
from moiety.adapt.rows import Images, Rows, Tokens
from moiety.adapt.stage import FURTHER, Stage
from moiety.adapt.teachers import Teacher, frozen, make_teacher
from moiety.adapt.trained import whole_state
from moiety.io import read_json, write_json

LIMITS = {"cached ÷ constant": 1.05, "time ÷ FLOPs": 1.15, "build ÷ pass": 1.1}
LR = 1e-5
MODELS: dict[str, dict[str, Any]] = {
    "vit-mae-base": {"kind": "image", "side": 224, "patch": 16, "dim": 768, "depth": 12,
                     "decoder": (512, 8), "batch": 64, "examples": 8192},
    "tiny-image": {"kind": "image", "side": 32, "patch": 4, "dim": 192, "depth": 12,
                   "decoder": (128, 4), "batch": 64, "examples": 32768},
    "roberta-base": {"kind": "text", "length": 128, "words": 50265, "dim": 768, "depth": 12,
                     "batch": 128, "examples": 8192},
    "tiny-text": {"kind": "text", "length": 128, "words": 8192, "dim": 256, "depth": 6,
                  "batch": 64, "examples": 16384},
    "minilm": {"kind": "text", "length": 64, "words": 30522, "dim": 384, "depth": 6,
               "batch": 32, "examples": 2048},
}  # fmt: skip


class Constant(Teacher):
    """A teacher that always says the same, from the device."""

    def __init__(self, encoder: Encoder, objective: Objective, target: Target) -> None:
        super().__init__(encoder, objective, "it is constant")
        self.target = target

    def ask(self, rows: Any, batch: Any, masks: Any) -> Target:
        return self.target


def build(shape: dict[str, Any]) -> Encoder:
    """A model with its first weights."""
    import transformers as T

    torch.manual_seed(0)
    size = {
        "hidden_size": shape["dim"],
        "num_hidden_layers": shape["depth"],
        "num_attention_heads": shape["dim"] // 64,
        "intermediate_size": 4 * shape["dim"],
    }
    if shape["kind"] == "text":
        config = T.RobertaConfig(
            vocab_size=shape["words"], max_position_embeddings=shape["length"] + 2, **size
        )
        return Encoder.load(T.RobertaForMaskedLM(config), processor=tokenizer(shape["words"]))
    width, depth = shape["decoder"]
    decoder = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 4 * width}
    model = T.ViTMAEForPreTraining(
        T.ViTMAEConfig(
            image_size=shape["side"],
            patch_size=shape["patch"],
            decoder_num_attention_heads=width // 32,
            **{f"decoder_{name}": value for name, value in decoder.items()},
            **size,
        )
    )
    place_patches(model)
    return Encoder.load(model)


def tokenizer(words: int) -> Any:
    """So many words, of which five are special."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    known = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(words - 5))])}
    names = zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special)
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, **dict(names))


def data(shape: dict[str, Any], examples: int) -> Rows:
    """Examples without meaning, all of one length."""
    lots = torch.Generator().manual_seed(0)
    if shape["kind"] == "image":
        size = (examples, 3, shape["side"], shape["side"])
        return Rows(Images(torch.randint(256, size, generator=lots, dtype=torch.uint8)), None)
    inside = torch.randint(5, shape["words"], (examples, shape["length"] - 2), generator=lots)
    return Rows(Tokens.of([[0, *row, 2] for row in inside.tolist()]), None)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of some work, with all that the device has to do for it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All numbers of one model."""
    shape, device = MODELS[name], torch.device(args.device)
    encoder, rows = build(shape).to(device), data(shape, args.examples or shape["examples"])
    objective = Objective(match="cls" if shape["kind"] == "image" else "hidden")
    batch = min(args.batch or shape["batch"], len(rows))
    recipe = Recipe(steps=10**6, batch=batch, lr=LR, checks=1, precision=args.precision)
    teacher_of = frozen(encoder.copy())
    inputs = look_through(encoder, rows)

    def one_pass() -> None:
        with torch.no_grad():
            for some in batches(teacher_of, rows):
                teacher_of.represent(some)

    def cache(number: int, own: Encoder) -> Teacher:
        return make_teacher(own, objective, rows, inputs, folder / f"{name}-{number}")

    one_pass()  # what libraries set up once
    builds, passes = [], []
    made: list[Teacher] = []
    for number in range(args.rounds):
        own = encoder.copy()
        passes.append(timed(one_pass, device))
        builds.append(timed(lambda n=number, own=own: made.append(cache(n, own)), device))
        made.pop().close(True)
    cached = cache(args.rounds, encoder.copy())
    first = encoder.batch(rows.take(torch.arange(batch)))
    wanted = cached.ask(torch.arange(batch), first, first.get("input_ids"))
    teachers = {"cached": cached, "constant": Constant(teacher_of, objective, wanted)}
    stages = {"further": stage(encoder, rows, recipe, args)}
    if shape["kind"] == "text":
        stages["transformers"] = peer = stage(encoder, rows, recipe, args)
        peer.encoder.masked_loss = partial(usual_loss, peer.encoder.model)
    for word, teacher in teachers.items():
        stages[word] = stage(encoder, rows, recipe, args, objective=objective, teacher=teacher)
    times: dict[str, list[float]] = {word: [] for word in stages}
    for turn in range(args.rounds + 1):
        for word, each in stages.items():
            took = timed(lambda each=each: advance(each, args.steps), device) / args.steps
            if turn:  # the first one warms up, and captures
                times[word].append(took)
    cached.close(True)
    flops = counted(encoder, rows, recipe, objective)
    name_of = timed(encoder.weights_key, device)
    return told(times, builds, passes, flops) | {"seconds of the name": round(name_of, 3)}


def counted(encoder: Encoder, rows: Rows, recipe: Recipe, objective: Objective) -> dict[str, float]:
    return Course(encoder=encoder, rows=rows, seed=0, follow=Follow()).flops(recipe, objective)


def stage(
    encoder: Encoder, rows: Rows, recipe: Recipe, args: argparse.Namespace, **more: Any
) -> Stage:
    own = encoder.copy()
    words = {"seed": 0, "initial": whole_state(own.model), "capture": args.capture, **more}
    made = Stage("step", own, rows, recipe, **{"objective": FURTHER, **words})
    made._begin()
    return made


def usual_loss(model: Any, batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    """The masked loss as transformers has it: over all hidden places of the batch alike."""
    ids, where = batch["input_ids"], mask >= 0
    shown, labels = torch.where(where, mask, ids), ids.masked_fill(~where, -100)
    return model(input_ids=shown, attention_mask=batch["attention_mask"], labels=labels).loss


def advance(each: Stage, steps: int) -> None:
    for _ in range(steps):
        each.advance()


def told(
    times: dict[str, list[float]], builds: list[float], passes: list[float], flops: dict[str, float]
) -> dict[str, Any]:
    """Milliseconds of a step, seconds of a pass, and the ratios that have a limit."""
    middle = {word: statistics.median(each) for word, each in times.items()}
    ratio = flops["cached"] / flops["further"]
    ratios = {
        "cached ÷ constant": middle["cached"] / middle["constant"],
        "time ÷ FLOPs": middle["cached"] / middle["further"] / ratio,
        "build ÷ pass": statistics.median(builds) / statistics.median(passes),
    }
    if "transformers" in middle:
        ratios["ours ÷ transformers"] = middle["further"] / middle["transformers"]
    return {
        "ms a step": {word: round(1000 * each, 3) for word, each in middle.items()},
        "ms of the rounds": {w: [round(1000 * t, 3) for t in each] for w, each in times.items()},
        "seconds of a pass": round(statistics.median(passes), 3),
        "seconds of a build": round(statistics.median(builds), 3),
        "FLOPs ratio": round(ratio, 3),
        "FLOPs ratio without a cache": round(flops["online"] / flops["further"], 3),
        "ratios": {word: round(value, 3) for word, value in ratios.items()},
        "pass": {word: ratios[word] <= limit for word, limit in LIMITS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--examples", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out")
    args = parser.parse_args()
    gpu = args.device.startswith("cuda")
    typed = [f"results/{Path(a).name}" if a == args.out else a for a in sys.argv[1:]]
    facts = {
        "command": f"python benchmarks/adapt.py {shlex.join(typed)}",
        "machine": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }
    kept = args.out and Path(args.out).exists()
    found = read_json(args.out)["models"] if kept else {}
    for name in args.model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {**facts, **measure(name, args, Path(folder))}
        print(name, found[name]["ms a step"], found[name]["ratios"], flush=True)
        if args.out:
            write_json(args.out, {"limits": LIMITS, "models": found})


if __name__ == "__main__":
    main()
