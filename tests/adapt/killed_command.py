"""`moiety adapt` from a saved RoBERTa and a text file to a classifier, killed again and again.

    python killed_command.py FOLDER "warm:4 step:4 cached taught:3 rounds tune:2 saving" METHOD

Every life ends by SIGKILL at a place of `PLACES`, at its third occurrence or the like; the last one
comes to the end. Prints as JSON what differs from a run that was left alone. One process imports
torch and forks for each life: a kill costs milliseconds.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import asking
import killed_pretraining
import torch
import transformers
from killed_pretraining import arm, files

from moiety.adapt import cache as caching
from moiety.adapt.objective import Objective
from moiety.adapt.tuning import Tuning

# As there: the act, when to die, the end of the target's path. Counting FLOPs comes before all else
# and takes two of `warm` or `step` and one of `taught`.
PLACES = killed_pretraining.PLACES | {
    "asked": ((os, "replace"), "before", "killed/plan.json"),
    "tokens": ((os, "replace"), "before", "corpus/ends.npy"),
    "heading": ((os, "replace"), "before", "round-2/cache/header.json"),
    "headed": ((os, "replace"), "after", "round-2/cache/header.json"),
    "second": ((Objective, "_distilled"), "before", ""),
    "tune": ((Tuning, "advance"), "before", ""),
    "tuning": ((os, "replace"), "after", "fine-tuning/latest.safetensors"),
    "history": ((os, "fsync"), "torn", "fine-tuning/history.jsonl"),
    "scored": ((os, "replace"), "before", "fine-tuning/result.json"),
    "tuned": ((os, "replace"), "after", "fine-tuning/final.safetensors"),
    "saving": ((os, "replace"), "before", "killed/adapted/model.safetensors"),
    "saved-half": ((os, "replace"), "before", "killed/adapted/config.json"),
    "classifier": ((os, "replace"), "before", "killed/classifier/config.json"),
    "check": ((os, "replace"), "before", "killed/check.safetensors"),
    "result": ((os, "replace"), "before", "killed/result.json"),
    "arm": ((os, "replace"), "before", "fine-tune/check.safetensors"),
    "page": ((os, "replace"), "after", "killed/compare.html"),
}
killed_pretraining.PLACES = PLACES


def live(folder, out, method):
    """One life of the command; states at every step."""
    words = ["--model", folder / "roberta", "--unlabelled", folder / "texts.txt"]
    words += ["--labelled", folder / "labelled", "--source", folder / "old.txt", "--rounds", 2]
    words += ["--steps", 4, "--warm-steps", 3, "--batch", 6, "--lr", 1e-3, "--checks", 2]
    words += ["--stop", "probe", "--patience", 9, "--epochs", 3, "--tune-batch", 8]
    words += ["--method", method]
    return asking.run(*words, "--save-every", 0, "--seed", 3, "--out", out)


def life(place, *given):
    """Live in a process of its own, and say how that ended."""
    child = os.fork()
    if not child:
        if place:
            arm(place)
        os._exit(live(*given))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder, places, method):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    caching.BATCH, caching.CHUNK = 4, 1  # a chunk is four texts
    folder.mkdir(exist_ok=True)
    asking.roberta(folder / "roberta", trunk=True)
    asking.texts(folder / "texts.txt", 40)  # as many as the steps ask for: there is a cache
    asking.texts(folder / "old.txt", 40)
    asking.tables(folder / "labelled")
    told, sys.stdout = sys.stdout, sys.stderr  # the command has its say there
    # Here, so that what it imports is there for every life.
    alone = live(folder, folder / "alone", method)
    ends = [(place, life(place, folder, folder / "killed", method)) for place in places]
    last = life("", folder, folder / "killed", method)
    one, two = files(folder / "killed"), files(folder / "alone")
    # The command that a comparison tells has the folder in it.
    two = {name: data.replace(b"/alone", b"/killed") for name, data in two.items()}
    differ = sorted(name for name in {*one, *two} if one.get(name) != two.get(name))
    survived = [f"{place} ({code})" for place, code in ends if code != -signal.SIGKILL]
    report = {"ends": [alone, last], "survived": survived, "differ": differ, "files": sorted(two)}
    told.write(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3])
