"""Unlabelled and labelled data of every source: packed, held out, kept, and read no earlier."""

import gzip
import json
import warnings

import numpy as np
import pandas
import pytest
import tiny
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from moiety.adapt import finetune, further_pretrain, reading
from moiety.adapt.corpus import read_corpus
from moiety.adapt.encoders import Encoder
from moiety.adapt.labelled import read_labelled
from moiety.adapt.rows import Images, Rows, hold_out
from moiety.data.problem import Problem, Split, Target

FIRST, LAST = 2, 3  # <s>, </s>


@pytest.fixture(scope="module")
def reader():
    torch.manual_seed(0)
    return Encoder.load(tiny.FAMILIES["bert"]().eval(), processor=tiny.tokenizer())


@pytest.fixture(scope="module")
def viewer():
    torch.manual_seed(0)
    return Encoder.load(tiny.vit_mae().eval())


def all_rows(corpus):
    return sorted(
        tuple(int(i) for i in row)
        for rows in (corpus.train, corpus.held)
        for row in rows.take(range(len(rows)))
    )


def write_table(path, texts, labels=None):
    rows = [{"text": text} for text in texts]
    for row, label in zip(rows, labels or []):
        row["label"] = label
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


# -- texts ----------------------------------------------------------------------------------------


def test_lines_are_packed_to_whole_rows_and_nothing_is_lost(tmp_path, reader):
    texts = tiny.texts(120, 3, 12)
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    corpus = read_corpus(tmp_path / "a.txt", reader, length=16)
    rows = all_rows(corpus)
    assert {row[0] for row in rows} == {FIRST}
    assert {row[-1] for row in rows} == {LAST}
    assert sum(len(row) < 16 for row in rows) <= 1  # what is left over at the end
    words = sorted(i for row in rows for i in row[1:-1])
    assert words == sorted(i for ids in reader.pieces(texts) for i in ids)
    assert len(corpus.held) == 16
    assert any("tokens" in note for note in corpus.notes)


def test_documents_of_a_folder_are_kept_apart(tmp_path, reader):
    for name, word in (("a.txt", "w1 "), ("b.txt.gz", "w2 ")):
        text = (word * 50 + "\n") * 20
        opened = gzip.open if name.endswith("gz") else open
        with opened(tmp_path / name, "wt") as file:
            file.write(text)
    rows = all_rows(read_corpus(tmp_path, reader, length=12))
    mixed = [row for row in rows if {6, 7} <= set(row)]
    assert len(mixed) <= 1
    assert all(row[row.index(7) - 1] == LAST for row in mixed)
    assert sum(row.count(LAST) for row in rows) == len(rows) + 1


def test_few_lines_stay_rows_of_their_own(tmp_path, reader):
    texts = tiny.texts(10)
    (tmp_path / "a.txt").write_text("\n".join(texts))
    wanted = sorted(tuple(row) for row in reader.tokenise(texts))
    assert all_rows(read_corpus(tmp_path / "a.txt", reader)) == wanted
    packed = read_corpus(tmp_path / "a.txt", reader, pack=True)
    assert len(all_rows(packed)) < 10


def test_rows_of_a_table_are_examples_that_are_cut(tmp_path, reader):
    texts = [*tiny.texts(60, 12, 20), "", "   "]
    path = write_table(tmp_path / "a.jsonl", texts)
    rows = all_rows(read_corpus(path, reader, length=8))
    assert len(rows) == 60
    assert rows == sorted(tuple(row) for row in reader.tokenise(texts[:60], 8))
    assert len(all_rows(read_corpus(path, reader, length=8, pack=True))) > 60


@pytest.mark.parametrize("pack", [True, False])
def test_rows_in_which_nothing_can_be_masked_are_left_out(reader, pack):
    texts = ["w1 w2 w3 w4", "these the tokenizer knows not", *tiny.texts(40)]
    rows = all_rows(read_corpus(texts, reader, length=5, pack=pack))
    assert all(set(row) - {0, 1, 2, 3} for row in rows)
    with pytest.raises(ValueError, match="no token that the tokenizer knows"):
        read_corpus(["unknown", "words"], reader, pack=pack)


def test_the_column_of_text_is_named_or_found(tmp_path, reader):
    path = tmp_path / "a.csv"
    lines = [f"{text},{other}" for text, other in zip(tiny.texts(20), tiny.texts(20, seed=1))]
    path.write_text("\n".join(["one,two", *lines]))
    found = [all_rows(read_corpus(path, reader, column=column)) for column in ("one", "two")]
    assert found[0] != found[1]
    with pytest.raises(ValueError, match="no column 'three'; it has one, two"):
        read_corpus(path, reader, column="three")
    with pytest.raises(ValueError, match="say which column holds the text, of one, two"):
        read_corpus(path, reader)


def test_texts_ids_and_rows_in_memory(reader):
    texts = tiny.texts(20)
    batch = reader.batch(texts)
    wanted = all_rows(read_corpus(texts, reader))
    assert wanted == sorted(tuple(row) for row in reader.tokenise(texts))
    given = TensorDataset(batch["input_ids"])
    corpus = read_corpus(given, reader)
    assert all_rows(corpus) == wanted
    assert read_corpus(corpus, reader) is corpus
    assert all_rows(read_corpus(corpus.train, reader)) == sorted(
        tuple(int(i) for i in row) for row in corpus.train.take(range(len(corpus.train)))
    )


def test_columns_of_tables_in_memory_are_texts(reader):
    texts = tiny.texts(20)
    frame = pandas.DataFrame({"text": texts})
    wanted = all_rows(read_corpus(texts, reader))
    for given in (frame["text"], np.array(texts), (text for text in texts)):
        assert all_rows(read_corpus(given, reader)) == wanted
    for given in (frame["text"], tuple(texts)):
        assert len(further_pretrain(reader, given, steps=1, batch=4, checks=1).stages) == 1
    with pytest.raises(ValueError, match=r"give the texts, such as list\(table\['text'\]\)"):
        further_pretrain(reader, frame, steps=1)
    with pytest.raises(ValueError, match=r"must be given as TensorDataset\(data\)"):
        further_pretrain(reader, torch.ones(4, 5).long(), steps=1)


def test_a_built_in_set_without_labels_is_a_corpus(monkeypatch, reader):
    texts = [f"w{i % 9} w{i % 7} w{i % 5}" for i in range(40)]
    monkeypatch.setattr(reading, "load_texts", lambda name, data_dir: texts)
    corpus = read_corpus("imdb-text", reader, length=8)
    assert len(corpus.train) + len(corpus.held) == 40


def test_what_is_held_out_follows_from_the_seed():
    rows = Rows(Images(torch.arange(2000).view(-1, 1, 1, 1)))
    train, held = hold_out(rows, 0.02, 16, seed=0)
    assert (len(train), len(held)) == (1960, 40)
    numbers = torch.cat([train.take(range(1960)), held.take(range(40))]).flatten()
    assert sorted(numbers.tolist()) == list(range(2000))
    assert np.array_equal(hold_out(rows, 0.02, 16, seed=0)[1].chosen, held.chosen)
    assert not np.array_equal(hold_out(rows, 0.02, 16, seed=1)[1].chosen, held.chosen)
    assert len(hold_out(rows.part(range(500)), 0.02, 16, seed=0)[1]) == 16
    assert len(hold_out(rows.part(range(20)), 0.02, 16, seed=0)[1]) == 10


def test_of_labelled_rows_every_class_gives_its_share_and_none_all():
    sizes = [600, 300, 90, 7, 2, 1]
    labels = torch.repeat_interleave(torch.arange(6), torch.tensor(sizes))
    labels = labels[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    rows = Rows(Images(torch.arange(1000).view(-1, 1, 1, 1)), labels=labels)
    drawn = set()
    for seed in range(20):
        train, held = hold_out(rows, 0.15, 16, seed)
        assert sorted([*train.chosen, *held.chosen]) == list(range(1000))
        assert torch.equal(held.labels, labels[held.chosen])
        assert len(held) == 150 and bytes(held.chosen) not in drawn
        drawn.add(bytes(held.chosen))
        for size, out in zip(sizes, torch.bincount(held.labels, minlength=6).tolist()):
            assert abs(out - 0.15 * size) <= 1 and out < size
    few = rows.part([int((labels == c).nonzero()[0]) for c in range(6)])  # one row of each class
    assert [len(part) for part in hold_out(few, 0.15, 16, 0)] == [3, 3]


def test_token_ids_are_kept_and_mapped(tmp_path, reader, monkeypatch):
    texts = tiny.texts(100)
    made = read_corpus(texts, reader, folder=tmp_path)
    assert isinstance(made.train.store.ids, np.memmap)
    wanted = all_rows(read_corpus(texts, reader))
    assert all_rows(made) == wanted
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that it must not write
        reader.batch(made.train.take([0, 1]))
    monkeypatch.setattr(reader, "tokenise", None)  # not to be asked again
    assert all_rows(read_corpus(texts, reader, folder=tmp_path)) == wanted
    monkeypatch.undo()
    for other in ({"length": 7}, {"pack": True}):  # another question, another answer
        found = read_corpus(texts, reader, folder=tmp_path, **other)
        assert all_rows(found) == all_rows(read_corpus(texts, reader, **other)) != wanted
    assert all_rows(read_corpus(texts[1:], reader, folder=tmp_path)) != wanted
    for name in ("ids", "ends"):  # damaged, it is made anew
        read_corpus(texts, reader, folder=tmp_path)
        (tmp_path / f"{name}.npy").write_bytes(b"damage")
        assert all_rows(read_corpus(texts, reader, folder=tmp_path)) == wanted


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("", "a.txt holds no text"),
        ("\n \n", "a.txt holds no text"),
        ("w1 w2 w3\n", "a.txt holds a single line; a corpus needs at least two"),
    ],
)
def test_too_small_a_corpus_is_refused(tmp_path, reader, content, wrong):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=wrong):
        read_corpus(tmp_path / "a.txt", reader)


def test_other_data_are_refused(tmp_path, reader, viewer):
    with pytest.raises(ValueError, match="there is no file or folder"):
        read_corpus(tmp_path / "nowhere", reader)
    with pytest.raises(ValueError, match=r"holds no \.txt file"):
        read_corpus(tmp_path, reader)
    with pytest.raises(ValueError, match="length must be from 3 to 24, got 25"):
        read_corpus(tiny.texts(), reader, length=25)
    with pytest.raises(ValueError, match="must hold texts"):
        read_corpus([1, 2], reader)
    with pytest.raises(ValueError, match="the model reads images: give a folder"):
        read_corpus(tiny.texts(), viewer)
    (tmp_path / "a.json").write_text('["w1", "w2"]')
    with pytest.raises(ValueError, match=r"a.json: a table must be \.jsonl"):
        read_corpus(tmp_path / "a.json", reader)
    with pytest.raises(ValueError, match="from 0 to 47"):
        read_corpus(TensorDataset(torch.full((4, 5), 48)), reader)
    with pytest.raises(ValueError, match="all padding"):
        read_corpus(TensorDataset(torch.zeros(4, 5).long()), reader)
    with pytest.raises(ValueError, match="at least two are needed"):
        read_corpus(TensorDataset(tiny.pictures(1)), viewer)
    with pytest.raises(ValueError, match="held must be a share"):
        read_corpus(tiny.texts(), reader, held=1.5)
    (tmp_path / "test.txt").write_text("w1\nw2\n")
    with pytest.raises(ValueError, match=r"test\.txt and no train"):
        read_corpus(tmp_path, reader)


def test_a_few_long_lines_are_packed_and_cut_ones_are_told(tmp_path, reader):
    lines = [" ".join(["w1"] * 100)] * 5
    (tmp_path / "long.txt").write_text("\n".join(lines))
    corpus = read_corpus(tmp_path / "long.txt", reader, length=20)
    assert f"{500 + 2 * 28} tokens in 28 rows" in corpus.notes  # 18 and two special ones a row
    (tmp_path / "short.txt").write_text("\n".join(["w1 w2"] * 19 + [" ".join(["w3"] * 60)]))
    corpus = read_corpus(tmp_path / "short.txt", reader, length=20)
    assert "1 of 20 texts fill all 20 tokens, or are cut" in corpus.notes
    for folder in (tmp_path / "kept", tmp_path / "kept"):  # written, then found
        again = read_corpus(tmp_path / "short.txt", reader, length=20, folder=folder)
        assert again.notes == corpus.notes


def test_texts_without_labels_of_a_built_in_set_are_read_on(reader, monkeypatch):
    texts = [f"w{i % 40} " * 30 for i in range(60)]
    monkeypatch.setattr("moiety.adapt.reading.load_texts", lambda *_: texts)
    corpus = read_corpus("imdb-text", reader, length=20)
    (note,) = [note for note in corpus.notes if "tokens in" in note]
    whole = 60 * 30 + 59  # a separator between two of them
    rows = -(-whole // 18)
    assert note == f"{whole + 2 * rows} tokens in {rows} rows"


def test_words_that_would_do_nothing_are_refused(tmp_path, reader, viewer):
    (tmp_path / "a.txt").write_text("\n".join(tiny.texts(40)))
    corpus = read_corpus(tmp_path / "a.txt", reader)
    images = TensorDataset(tiny.pictures(8))
    for source, encoder, words in (
        (tmp_path / "a.txt", reader, {"column": "text"}),
        (tmp_path / "a.txt", reader, {"fit": True}),
        (corpus, reader, {"length": 9}),
        (corpus.train, reader, {"pack": True}),
        (images, viewer, {"length": 9}),
        (images, viewer, {"column": "images"}),
    ):
        with pytest.raises(ValueError, match=f"^{min(words)} does nothing for these data"):
            read_corpus(source, encoder, **words)
    with pytest.raises(ValueError, match="of a table in memory give the texts"):
        read_corpus({"text": ["w1", "w2"], "label": [0, 1]}, reader)


def test_what_was_read_with_another_tokenizer_is_refused(tmp_path, reader, viewer):
    other = Encoder.load(
        tiny.FAMILIES["bert"](), processor=tiny.tokenizer([f"v{i}" for i in range(43)])
    )
    corpus = read_corpus([f"w{i} w1 w2" for i in range(40)], reader)
    rows = [f"w{i} w1,{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]))
    data = read_labelled(tmp_path, reader)
    words = {"steps": 1, "batch": 4}
    for run in (
        lambda model: further_pretrain(model, corpus, **words),
        lambda model: further_pretrain(model, corpus.train, **words),
        lambda model: further_pretrain(model, ["v1 v2 v3"] * 30, labelled=data, **words),
        lambda model: finetune(model, data, **words),
        lambda model: finetune(model, data.train, **words),
    ):
        with pytest.raises(ValueError, match="were read with another tokenizer: read the data"):
            run(other)
    with pytest.raises(ValueError, match="the model reads images, and these rows hold none"):
        finetune(viewer, data.train, **words)
    reader.save(tmp_path / "saved")  # the same tokenizer, from the disk
    finetune(Encoder.load(tmp_path / "saved"), data.train, **words)


# -- images ---------------------------------------------------------------------------------------


def save_images(folder, images):
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        pixels = image.permute(1, 2, 0).numpy().squeeze()
        Image.fromarray(pixels).save(folder / f"{number}.png")


def both(corpus):
    rows = [rows.take(range(len(rows))) for rows in (corpus.train, corpus.held)]
    return sorted(image.numpy().tobytes() for part in rows for image in part)


def test_images_of_a_folder_an_array_and_a_dataset(tmp_path, viewer):
    images = tiny.pictures(20)
    save_images(tmp_path / "all" / "some", images)
    np.savez(tmp_path / "a.npz", images=images.permute(0, 2, 3, 1).numpy(), labels=np.zeros(20))
    wanted = sorted(image.numpy().tobytes() for image in images)
    for source in (tmp_path / "all", tmp_path / "a.npz", TensorDataset(images)):
        assert both(read_corpus(source, viewer)) == wanted
    batch = viewer.batch(read_corpus(TensorDataset(images), viewer).train.take([0, 1]))
    assert batch["pixel_values"].shape == (2, 3, 12, 12)


def test_grey_arrays_need_no_channels(tmp_path):
    viewer = Encoder.load(tiny.vit_mae(channels=1).eval())
    images = tiny.pictures(20, channels=1)
    np.save(tmp_path / "a.npy", images[:, 0].numpy())
    np.savez(tmp_path / "b.npz", train_images=images[:, 0].numpy(), train_labels=np.zeros(20))
    for name in ("a.npy", "b.npz"):
        assert both(read_corpus(tmp_path / name, viewer)) == sorted(
            image.numpy().tobytes() for image in images
        )


def test_other_images_are_refused_or_made_to_fit(tmp_path, viewer):
    large, grey = tiny.pictures(6, 16), tiny.pictures(6, channels=1)
    save_images(tmp_path / "large", large)
    save_images(tmp_path / "grey", grey)
    for source in (tmp_path / "large", TensorDataset(large)):
        with pytest.raises(ValueError, match=r"are 16×16, and the model reads 12×12.*fit=True"):
            read_corpus(source, viewer)
    for source in (tmp_path / "grey", TensorDataset(grey)):
        with pytest.raises(ValueError, match="have 1 channels, and the model reads 3"):
            read_corpus(source, viewer)
        fitted = read_corpus(source, viewer, fit=True).train.take([0])
        assert fitted.shape == (1, 3, 12, 12)
        assert torch.equal(fitted[:, 0], fitted[:, 2])
    flat = torch.full((4, 3, 20, 30), 77, dtype=torch.uint8)
    fitted = read_corpus(TensorDataset(flat), viewer, fit=True).train.take([0, 1])
    assert fitted.unique().tolist() == [77]
    with pytest.raises(ValueError, match="only uint8"):
        read_corpus(TensorDataset(flat.float()), viewer, fit=True)


# -- labelled -------------------------------------------------------------------------------------


def split_folder(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    for split, count in (("train", 40), ("dev", 8)):
        labels = ["yes" if i % 2 else "no" for i in range(count)]
        write_table(tmp_path / f"{split}.jsonl", tiny.texts(count), labels)
    return tmp_path


def test_the_test_file_is_not_read_before_its_time(tmp_path, reader):
    folder = split_folder(tmp_path)
    (folder / "test.jsonl").write_text("this raises when it is read\n")
    read_corpus(folder, reader)
    data = read_labelled(folder, reader)
    assert data.classes == data.train.classes == ["no", "yes"]
    assert (len(data.train), len(data.validation)) == (40, 8)
    assert data.train.labels.tolist() == [0, 1] * 20
    assert data.train.part([1, 2]).labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match="this is not JSON"):
        data.test()


def test_rows_without_a_class_are_left_out_and_told(tmp_path, reader):
    folder = split_folder(tmp_path)
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"text": "w1 w2", "label": null}\n{"text": "w3 w4"}\n')
    data = read_labelled(folder, reader)
    assert len(data.train) == 40
    assert data.notes == ["train.jsonl: 2 rows without label are left out"]
    table = write_table(tmp_path / "all.jsonl", tiny.texts(41), [*["yes", "no"] * 20, None])
    assert read_labelled(table, reader).notes == ["targets: 1 rows without a target were left out"]


def test_labelled_texts_of_unknown_words_alone_are_refused(tmp_path, reader):
    write_table(tmp_path / "train.jsonl", ["ünknöwn wörds", "ändere"] * 20, ["yes", "no"] * 20)
    with pytest.raises(
        ValueError, match="labelled texts hold no token that the tokenizer knows; give"
    ):
        read_labelled(tmp_path, reader)
    known, unknown = split_folder(tmp_path / "known"), ["ünknöwn"] * 4
    write_table(known / "test.jsonl", unknown, ["yes", "no"] * 2)
    assert len(read_labelled(known, reader).test()) == 4  # that is scored as it is


def test_a_name_that_is_near_that_of_a_built_in_set_is_told(tmp_path, reader, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"no file or folder sci-cite, and .* did you mean scicite\?"
    ):
        read_corpus("sci-cite", reader)


def test_what_holds_no_classes_is_refused_before_the_test(tmp_path, reader):
    folder = split_folder(tmp_path)
    (folder / "test.jsonl").write_text("this raises when it is read\n")
    write_table(folder / "train.jsonl", tiny.texts(40), [i / 40 for i in range(40)])
    with pytest.raises(ValueError, match=r"train\.jsonl: .* 40 different values in 40 rows"):
        read_labelled(folder, reader)
    (folder / "train.jsonl").unlink()
    (folder / "train.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match=r"train\.csv holds no labelled example"):
        read_labelled(folder, reader)


def test_only_a_test_file_can_stay_closed(tmp_path, reader):
    folder = split_folder(tmp_path)
    assert not read_labelled(folder, reader).closed  # there is none
    write_table(folder / "test.jsonl", ["w1 w2", "w3"], ["yes", "no"])
    assert read_labelled(folder, reader).closed
    table = write_table(tmp_path / "all.jsonl", tiny.texts(40), ["yes", "no"] * 20)
    assert not read_labelled(table, reader).closed


def test_the_test_split_is_read_once(tmp_path, reader):
    folder = split_folder(tmp_path)
    with pytest.raises(ValueError, match="no test split"):
        read_labelled(folder, reader).test()
    write_table(folder / "test.jsonl", ["w1 w2", "w3"], ["yes", "no"])
    data = read_labelled(folder, reader)
    assert data.test().labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match="read once only"):
        data.test()
    write_table(folder / "test.jsonl", ["w1 w2"], ["maybe"])
    with pytest.raises(ValueError, match="the class 'maybe', which train lacks"):
        read_labelled(folder, reader).test()


def test_labelled_images_by_class(tmp_path, viewer):
    for split, count in (("train", 20), ("test", 3)):
        for place, name in enumerate(("cat", "dog")):
            save_images(tmp_path / split / name, tiny.pictures(count, seed=place))
    data = read_labelled(tmp_path, viewer)
    assert (len(data.train), len(data.validation)) == (24, 16)  # by the seed, of train
    test = data.test()
    assert test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(
        test.take([0, 3]), torch.stack([tiny.pictures(3)[0], tiny.pictures(3, seed=1)[0]])
    )
    other = read_labelled(tmp_path, viewer, seed=1)
    assert not np.array_equal(other.train.chosen, data.train.chosen)


def test_labelled_data_in_memory(reader, viewer):
    images, labels = tiny.pictures(40), torch.arange(40) % 3
    data = read_labelled({"train": TensorDataset(images, labels)}, viewer)
    assert data.classes == ["0", "1", "2"]
    found = sorted([*data.train.labels.tolist(), *data.validation.labels.tolist()])
    assert found == sorted(labels.tolist())
    problem = Problem(
        "toy",
        "text",
        [Target("label", "classes", ["no", "yes"])],
        *(Split({}, {"label": torch.tensor([0, 1])}, ["w1", "w2 w3"]) for _ in range(3)),
    )
    data = read_labelled(problem, reader)
    assert [row.tolist() for row in data.train.take([0, 1])] == reader.tokenise(["w1", "w2 w3"])
    assert data.test().labels.tolist() == [0, 1]
    assert len(read_corpus(problem, reader).held) == 1
    with pytest.raises(ValueError, match="toy holds texts with classes"):
        read_labelled(problem, viewer)


def test_a_class_is_a_word_or_a_whole_number(tmp_path, reader):
    rows = [json.dumps({"text": f"w{i}", "label": [i % 2]}) for i in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"a class must be a word or a number, not \[0\]"):
        read_labelled(tmp_path, reader)
    ids = torch.randint(5, 40, (20, 6))
    for labels in (torch.rand(20), torch.arange(20) % 2 - 1, torch.zeros(20, 1).long()):
        with pytest.raises(ValueError, match="labels of train must be one whole number from 0 on"):
            read_labelled(TensorDataset(ids, labels), reader)
    with pytest.raises(ValueError, match=r"labelled data must be a path.*, not list"):
        read_labelled(["w1", "w2"], reader)


def test_a_single_class_is_refused(tmp_path, reader):
    write_table(tmp_path / "train.jsonl", tiny.texts(4), ["a"] * 4)
    with pytest.raises(ValueError, match="all examples are of the class 'a'"):
        read_labelled(tmp_path, reader)
