"""A teacher's representations on disk are what the teacher says, whatever happened meanwhile."""

import json
import logging
import os
import threading
from dataclasses import replace

import pytest
import tiny
import torch
from rows import Rows, encoder, rows, upcycled

import moiety
from moiety.adapt import cache as caching
from moiety.adapt.cache import Cache, look_through
from moiety.adapt.objective import Objective
from moiety.adapt.teachers import Cached, cache_key, frozen, make_teacher

KINDS = ("image", "text")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(caching, "BATCH", 4)
    monkeypatch.setattr(caching, "CHUNK", 1)  # a chunk is one batch


def opened(kind, folder, match="hidden", **words):
    """A teacher, its data and its cache, not yet built."""
    teacher, data, objective = frozen(encoder(kind)), rows(kind, 18), Objective(match=match)
    key = cache_key(teacher, objective, data, look_through(teacher, data), **words)
    return teacher, data, Cached(teacher, objective, Cache.open(folder, key))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("match", ["hidden", "cls"])
def test_it_holds_what_the_teacher_says_of_every_example(tmp_path, kind, match):
    teacher, data, cached = opened(kind, tmp_path, match)
    cached.build(data)
    chosen = torch.tensor([17, 2, 3, 9])
    batch = teacher.batch(data.take(chosen))
    wanted = cached.objective.target(teacher, batch, None).values
    if match == "hidden":
        wanted = torch.where(teacher.represent(batch).real[..., None], wanted, 0.0)
    for expected in (False, True):  # read at once, or ahead in another thread
        if expected:
            cached.expect(chosen)
        made = cached.ask(chosen, batch, None).values
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "values.bin").stat().st_size == cached.cache.key.bytes
    cached.expect(torch.tensor([1, 1, 1, 1]))  # other rows than those asked for next
    torch.testing.assert_close(cached.ask(chosen, batch, None).values, wanted, rtol=1e-4, atol=1e-6)
    cached.close(done=False)
    assert (tmp_path / "values.bin").exists()
    cached.close(done=True)
    assert not tmp_path.exists()


def test_values_that_lie_on_a_device_are_those_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(Cached, "_room", lambda self: torch.full(self.cache.key.shape, torch.nan))
    torch.manual_seed(0)
    _, data, first = opened("image", tmp_path)
    first.build(data)
    first.cache.settle()
    lines = first.cache.lines_path.read_text().splitlines(keepends=True)
    first.cache.lines_path.write_text("".join(lines[:2]))  # as if it had been killed there
    torch.manual_seed(0)
    _, data, again = opened("image", tmp_path)
    asked, real = [], again.represent
    again.represent = lambda out, data, rows: asked.append(len(rows)) or real(out, data, rows)
    again.build(data)
    assert len(asked) == len(lines) - 2 > 0
    for cached in (first, again):
        assert torch.equal(cached.values, cached.cache.take(torch.arange(len(data))))


def test_the_disk_is_not_waited_for_where_the_device_has_the_values(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Cached, "_room", lambda self: torch.full(self.cache.key.shape, torch.nan))
    _, data, cached = opened("image", tmp_path)
    open_again, write = threading.Event(), os.pwrite

    def waits(*args):
        assert open_again.wait(60)
        return write(*args)

    monkeypatch.setattr(os, "pwrite", waits)
    cached.build(data)
    assert not cached.values.isnan().any() and not cached.cache.lines_path.exists()
    open_again.set()
    values = cached.values
    cached.close(done=False)
    assert len(cached.cache.whole()) == cached.cache.chunks
    assert torch.equal(values, cached.cache.take(torch.arange(len(data))))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    _, data, cached = opened("image", tmp_path / "full")
    cached.build(data)  # the training goes on without the disk
    assert not cached.values.isnan().any()
    cached.close(done=False)
    assert "will be computed again: [Errno 28] No space left on device" in caplog.text


def test_a_disk_that_failed_once_is_tried_again(tmp_path, monkeypatch):
    _, data, cached = opened("image", tmp_path)
    write, left = os.pwrite, [1]

    def fails_once(*args):
        if left:
            left.pop()
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", fails_once)
    with pytest.raises(OSError, match="No space left"):
        cached.build(data)
    assert not cached.cache.writing
    cached.build(data)
    assert len(cached.cache.whole()) == cached.cache.chunks


def test_what_interrupts_a_build_is_what_is_raised_and_nobody_writes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Cached, "_room", lambda self: torch.full(self.cache.key.shape, torch.nan))
    teacher, data, writes = frozen(encoder("image")), rows("image", 18), []

    def fails(*args):
        writes.append(1)
        raise RuntimeError("a writer's own trouble")

    def interrupted(self, records, data, chosen):
        if chosen[0] == 8:
            raise KeyboardInterrupt
        records.zero_()

    monkeypatch.setattr(os, "pwrite", fails)
    monkeypatch.setattr(Cached, "represent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_teacher(teacher, Objective(), data, look_through(teacher, data), tmp_path)
    assert len(writes) == 1  # after one that failed none is tried


def test_it_goes_on_where_it_was_broken_off(tmp_path):
    _, data, whole = opened("text", tmp_path / "whole")
    whole.build(data)
    torch.manual_seed(0)
    _, data, broken = opened("text", tmp_path / "broken")
    real, calls = broken.represent, []

    def fails(records, data, chosen):
        calls.append(chosen.tolist())
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(records, data, chosen)

    broken.represent = fails
    with pytest.raises(KeyboardInterrupt):
        broken.build(data)
    broken.build(data)
    # 18 rows in batches of 4: two are whole and stay, the third is computed again.
    assert [c[0] for c in calls] == [0, 4, 8, 8, 12, 16]
    assert files(tmp_path / "whole") == files(tmp_path / "broken")


def test_what_is_damaged_is_computed_again(tmp_path):
    _, data, cached = opened("image", tmp_path)
    cached.build(data)
    sound = files(tmp_path)
    with open(tmp_path / "values.bin", "r+b") as file:
        file.seek(len(sound["values.bin"]) // 2)
        file.write(b"damage")
    with open(tmp_path / "chunks.jsonl", "ab") as file:
        file.write(b'{"chunk": 3, "sha')
    computed = []
    real = cached.represent
    cached.represent = lambda out, data, rows: (
        computed.append(rows[0].item()) or real(out, data, rows)
    )
    cached.build(data)
    assert computed == [8]
    mended = files(tmp_path)
    assert mended["values.bin"] == sound["values.bin"]
    lines = [sorted(files["chunks.jsonl"].splitlines()) for files in (mended, sound)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"chunk": 99, "sha256": ""}', '{"chunk": 0}'])
def test_a_line_of_nothing_is_taken_out(tmp_path, line):
    _, data, cached = opened("image", tmp_path)
    cached.build(data)
    sound = files(tmp_path)
    (tmp_path / "chunks.jsonl").write_bytes(f"{line}\n".encode() + sound["chunks.jsonl"])
    assert cached.cache.whole() == set(range(cached.cache.chunks))
    assert files(tmp_path) == sound
    (tmp_path / "header.json").write_text("[]")
    with pytest.raises(ValueError, match="caches the representations of another teacher"):
        Cache.open(tmp_path, cached.cache.key)


def test_a_cache_of_another_teacher_is_refused(tmp_path):
    teacher, data, cached = opened("text", tmp_path)
    cached.build(data)
    key = cached.cache.key
    for name, value in {
        "teacher": "0",
        "input": "0",
        "layer": "first",
        "dtype": "bfloat16",
        "shape": (1, 2, 3),
    }.items():
        with pytest.raises(ValueError, match=f"representations of another {name}: delete it"):
            Cache.open(tmp_path, replace(key, **{name: value}))
    with torch.no_grad():
        next(teacher.trunk.parameters()).add_(1e-3)
    with pytest.raises(ValueError, match="another teacher"):
        make_teacher(teacher, Objective(), data, look_through(teacher, data), tmp_path)


def test_the_key_sees_every_example_and_every_weight():
    one = encoder("text")
    data, longer = rows("text", 18), rows("text", 18)
    assert look_through(one, data) == look_through(one, rows("text", 18))
    longer.items[17] += " w1"
    assert look_through(one, data).digest != look_through(one, longer).digest
    assert look_through(one, data).longest == max(len(t.split()) + 2 for t in data.items)


def test_half_precision_takes_half_the_room(tmp_path):
    _, data, full = opened("image", tmp_path / "full")
    torch.manual_seed(0)
    _, _, half = opened("image", tmp_path / "half", dtype="bfloat16")
    full.build(data), half.build(data)
    assert half.cache.key.bytes * 2 == full.cache.key.bytes
    torch.testing.assert_close(half.cache.mapped.float(), full.cache.mapped, rtol=1e-2, atol=1e-2)


def test_a_disk_that_is_too_small_is_told_before(tmp_path, monkeypatch):
    _, data, cached = opened("image", tmp_path)
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda _: type("Use", (), {"free": 100}))
    with pytest.raises(ValueError, match=r"take 11.5 kB and .* has room for 100 bytes"):
        cached.build(data)


def test_it_must_be_built_before_it_is_read(tmp_path):
    _, _, cached = opened("image", tmp_path)
    with pytest.raises(ValueError, match="is not complete: call build first"):
        cached.cache.take(torch.arange(2))


# -- what is not cached ------------------------------------------------------------------------


class Noisy(Rows):
    """Images with noise of their own at every look."""

    def take(self, rows):
        return super().take(rows).float() / 255 + 0.01 * torch.rand(len(rows), 3, 12, 12)


class Mirrored(Rows):
    """Images of which one in ten is mirrored, at every look others."""

    def take(self, rows):
        images, some = super().take(rows), torch.rand(len(rows), 1, 1, 1) < 0.1
        return torch.where(some, images.flip(-1), images)


class Joined(Noisy):
    """Images that are plain, then as many that are not."""

    def take(self, rows):
        plain = Rows.take(self, rows).float() / 255
        late = (torch.as_tensor(rows) >= len(self) // 2)[:, None, None, None]
        return torch.where(late, super().take(rows), plain)


def test_rows_of_a_very_large_corpus_are_looked_at_to_its_end():
    class Huge:
        def __len__(self):
            return 16_777_220  # of which a float32 knows no neighbour

        def take(self, rows):
            seen.extend(rows.tolist())
            return tiny.pictures(len(rows))

    seen: list[int] = []
    assert not caching._augmented(encoder("image"), Huge())
    assert (min(seen), max(seen), len(set(seen))) == (0, len(Huge()) - 1, 64)


def coupled():
    teacher = upcycled("text")
    layer = next(m for m in teacher.model.modules() if isinstance(m, moiety.MoE))
    layer.capacity_factor = 1.0
    return teacher


def unmasked():
    teacher = encoder("text")
    teacher.sees_padding = True  # as FNet does
    return teacher


@pytest.mark.parametrize(
    ("teacher", "data", "objective", "words", "why"),
    [
        (encoder, rows("image"), {"match": "prediction"}, {}, "depend on the masks"),
        (encoder, rows("image"), {"match": "weights"}, {}, "its weights are all it says"),
        (encoder, Noisy(rows("image").items), {}, {}, "augmented at random"),
        (encoder, Mirrored(rows("image", 64).items), {}, {}, "augmented at random"),
        (encoder, Joined(rows("image", 200).items), {}, {}, "augmented at random"),
        (encoder, rows("image"), {}, {"limit": 1000}, "15.4 kB are more than the cache limit of 1"),
        (encoder, rows("image"), {}, {"cache": False}, "no cache is wanted"),
        (coupled, rows("text"), {}, {}, "shares the capacity"),
        (unmasked, rows("text"), {}, {}, "it sees the padding of its batch"),
        (upcycled, rows("text"), {"match_routing": 1.0}, {}, "its routers are matched"),
    ],
)
def test_a_teacher_that_cannot_be_cached_says_why(
    tmp_path, caplog, teacher, data, objective, words, why
):
    kind = "text" if isinstance(data.items, list) else "image"
    teacher = teacher() if teacher in (coupled, unmasked) else teacher(kind)
    caplog.set_level(logging.INFO, logger="moiety.adapt")
    inputs = look_through(teacher, data)
    made = make_teacher(teacher, Objective(**objective), data, inputs, tmp_path / "cache", **words)
    assert not isinstance(made, Cached)
    assert why in made.online
    assert f"the teacher runs at every step: {made.online}" in caplog.text
    assert not (tmp_path / "cache").exists()


def test_a_teacher_that_can_be_cached_says_how_large_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="moiety.adapt")
    teacher, data = encoder("image"), rows("image")
    folder = tmp_path / "cache"
    made = make_teacher(teacher, Objective(), data, look_through(teacher, data), folder)
    assert isinstance(made, Cached) and made.online is None
    assert "the teacher's representations take 15.4 kB" in caplog.text  # 24 · 10 tokens · 16 · 4
    assert json.loads((folder / "header.json").read_text())["shape"] == [24, 10, 16]


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("room", [True, False], ids=["on the GPU", "on the disk"])
def test_a_gpu_names_a_teacher_and_writes_its_cache_as_a_cpu_does(tmp_path, monkeypatch, room):
    monkeypatch.setattr(caching, "PIECE", 1000)  # a tensor is fetched in many
    teacher, data = frozen(encoder("text")), rows("text", 18)
    name = teacher.weights_key()
    assert teacher.to("cuda").weights_key() == name
    if not room:
        monkeypatch.setattr(Cached, "_room", lambda self: None)
    made = make_teacher(teacher.copy(), Objective(), data, look_through(teacher, data), tmp_path)
    made.cache.settle()
    assert len(made.cache.whole()) == made.cache.chunks > 1
    kept = made.cache.take(torch.arange(len(data)))
    if room:
        assert torch.equal(made.values.cpu(), kept)
    batch = teacher.batch(data.take(torch.arange(len(data))))
    said = teacher.represent(batch)
    wanted = torch.where(said.real[..., None], said.features, 0.0).cpu()
    torch.testing.assert_close(kept, wanted, rtol=1e-4, atol=1e-5)
    made.close(done=True)
