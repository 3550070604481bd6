"""An adaptation that is killed again and again.

    python killed_pretraining.py FOLDER STEPS "warm:3 step:4 cached between …"

Every life ends by SIGKILL at a place of `PLACES`, at its third occurrence or the like; the last one
comes to the end. Counting FLOPs takes two steps before all others, one with a teacher. Prints as
JSON what differs from a run that was left alone. One process imports torch and forks for each
life: a kill costs milliseconds.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import tiny
import torch
import transformers
from rows import labelled

from moiety.adapt import cache as caching
from moiety.adapt.cache import Cache
from moiety.adapt.encoders import Encoder
from moiety.adapt.objective import Objective
from moiety.adapt.pretrain import self_distill

OTHER = {"seconds.json", ".lease.lock", ".lease.json"}  # no two runs take the same time

# By name: the act, whether to die before it, after it or with half a line on the disk, and of files
# the end of the target's path.
PLACES = {
    "plan": ((os, "replace"), "before", "plan.json"),
    "warm": ((Objective, "backward"), "before", ""),
    "warmed": ((os, "replace"), "after", "warm-up/final.safetensors"),
    "initial": ((os, "replace"), "before", "initial.safetensors"),
    "step": ((Objective, "backward"), "before", ""),
    "save": ((os, "replace"), "before", "further/latest.safetensors"),
    "saved": ((os, "replace"), "after", "further/latest.safetensors"),
    "line": ((os, "fsync"), "torn", "further/follow.jsonl"),
    "final": ((os, "replace"), "before", "further/final.safetensors"),
    "between": ((os, "replace"), "after", "further/final.safetensors"),
    "chunk": ((os, "pwrite"), "before", ""),
    "written": ((os, "pwrite"), "after", ""),
    "cached": ((os, "fsync"), "torn", "cache/chunks.jsonl"),
    "taught": ((Objective, "_distilled"), "before", ""),
    "kept": ((os, "replace"), "after", "round-1/latest.safetensors"),
    "rounds": ((os, "replace"), "after", "round-1/final.safetensors"),
    "remove": ((Cache, "remove"), "before", ""),
    "end": ((os, "replace"), "before", "round-2/final.safetensors"),
}


def live(folder, model, steps):
    """One life: an encoder saved alone, two rounds, states at every step."""
    encoder = Encoder.load(model, seed=0)
    texts = tiny.texts(24)
    words = {"steps": steps, "warm_steps": steps, "batch": 6, "lr": 1e-3, "checks": 2}
    probed = {"labelled": labelled("text"), "stop": "probe", "patience": 99}
    return self_distill(
        encoder, texts, rounds=2, seed=3, out=folder, save_every=0.0, **words, **probed
    )


def arm(place):
    """Make this process die at a place."""
    name, _, times = place.partition(":")
    (owner, attribute), when, target = PLACES[name]
    left, real = int(times or 1), getattr(owner, attribute)

    def deadly(*args, **words):
        nonlocal left
        here = not target or path_of(args).endswith(target)
        left -= here
        if here and not left and when != "after":
            if when == "torn":
                os.truncate(args[0], os.fstat(args[0]).st_size - 7)
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **words)
        if here and not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, deadly)


def path_of(args):
    """The path that a call is about; that of an open file is found by its number."""
    if isinstance(args[0], int):
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return str(args[-1])


def life(place, *given):
    """Live in a process of its own, and say how that ended."""
    child = os.fork()
    if not child:
        try:
            if place:
                arm(place)
            live(*given)
        except BaseException as error:
            sys.stderr.write(f"{place}: {error!r}\n")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def files(folder):
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name not in OTHER)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def main(folder, steps, places):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    caching.BATCH, caching.CHUNK = 4, 1  # a chunk is four texts
    torch.manual_seed(0)
    model = folder / "model"
    tiny.FAMILIES["roberta"]().base_model.save_pretrained(model)  # the head is missing
    tiny.tokenizer().save_pretrained(model)
    live(folder / "alone", model, steps)  # here, so that what it imports is there for every life
    ends = [(place, life(place, folder / "killed", model, steps)) for place in places]
    last = life("", folder / "killed", model, steps)
    one, two = files(folder / "killed"), files(folder / "alone")
    differ = sorted(n for n in {*one, *two} if one.get(n) != two.get(n))
    survived = [place for place, code in ends if code != -signal.SIGKILL]
    report = {"last": last, "survived": survived, "differ": differ, "files": len(two)}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split())
