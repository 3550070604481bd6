"""Reading tables that others made."""

import gzip
import lzma
import zipfile

import pandas
import pytest

from moiety.tables import open_packed, read_lines, read_table

FRAME = pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y z", 'say "w"'], "c": [0.5, None, 2.0]})


@pytest.mark.parametrize(
    "name", ["t.csv", "t.tsv", "t.jsonl", "t.parquet", "t.csv.gz", "t.jsonl.xz"]
)
def test_every_format_gives_the_same_table(tmp_path, name):
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    path = tmp_path / name.removesuffix(".gz").removesuffix(".xz")
    write = {
        ".csv": lambda: FRAME.to_csv(path, index=False),
        ".tsv": lambda: FRAME.to_csv(path, index=False, sep="\t"),
        ".jsonl": lambda: FRAME.to_json(path, orient="records", lines=True),
        ".parquet": lambda: FRAME.to_parquet(path),
    }
    write[path.suffix]()
    for packing, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        if name.endswith(packing):
            (tmp_path / name).write_bytes(pack(path.read_bytes()))
    read = read_table(tmp_path / name)
    pandas.testing.assert_frame_equal(read, FRAME, check_dtype=False)
    assert len(read_table(tmp_path / name, limit=2)) == 2


def test_a_lone_quote_in_a_tsv_is_a_character(tmp_path):
    (tmp_path / "t.tsv").write_text('text\tlabel\n"well said\tjoy\nfine\tanger\n')
    assert list(read_table(tmp_path / "t.tsv")["text"]) == ['"well said', "fine"]


def test_quotes_of_a_tsv_are_told_by_whole_cells(tmp_path):
    words = "text\tlabel\n" + '"w0 \u2028 ""x"" y"\tjoy\n'  # a sign at which no row ends
    (tmp_path / "t.tsv").write_text(words)
    assert list(read_table(tmp_path / "t.tsv")["text"]) == ['w0 \u2028 "x" y']
    (tmp_path / "long.tsv").write_text('"text"\t"label"\n' + '"some words"\t"joy"\n' * 60_000)
    assert set(read_table(tmp_path / "long.tsv")["text"]) == {"some words"}


def test_none_is_a_word_and_a_question_mark_is_a_gap(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\nNone,1\n?,2\n NA,3\nnone,4\n")
    assert list(read_table(tmp_path / "t.csv")["a"].isna()) == [False, True, True, False]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"39,State-gov,77516\n50,Private,83311\n", "seems to have no header"),
        ("a.csv", b"great film,1\nbad film,0\n", "seems to have no header"),
        ("a.csv", b"a,b,a\n1,2,3\n", "two columns 'a'; rename one"),
        ("a.csv", b"", "a.csv is empty; its first line must name"),
        ("a.csv", b'a,b\n"never closed,1\n', "a.csv cannot be read"),
        ("a.csv.gz", b"not packed", "a.csv.gz is damaged"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n" * 99, mtime=0)[:-9], "a.csv.gz is damaged"),
        ("a.jsonl", b'{"a": 1}\n[2]\n', "example 2: a line must be an object"),
        ("a.jsonl", b'{"a": 1}\n{\n', "example 2: this is not JSON"),
        ("a.parquet", b"x", "a.parquet"),
        ("a.xls", b"x", "must be one of .csv"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as raised:
        read_table(tmp_path / name)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("header", ["0,1,2,label", "1,2,3,label", "year,2019,2020,2021", "x,y,nan"])
def test_a_header_of_numbers_in_order_is_a_header(tmp_path, header):
    (tmp_path / "a.csv").write_text(f"{header}\n" + ",".join("7" * len(header.split(","))) + "\n")
    assert list(read_table(tmp_path / "a.csv").columns) == header.split(",")


def test_a_packed_file_may_not_unpack_to_more_than_the_limit(tmp_path):
    (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(b"0" * 10**6))
    with (
        open_packed(tmp_path / "bomb.csv.gz", limit=10**5) as file,
        pytest.raises(ValueError, match=r"bomb.csv.gz holds more than"),
    ):
        file.read()


def test_an_archive_holds_one_table(tmp_path):
    path = tmp_path / "a.csv.zip"
    for names in (["a.csv"], ["a.csv", "__MACOSX/._a.csv"]):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "a,b\n1,2\n")
        assert read_table(path).to_dict("list") == {"a": [1], "b": [2]}
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("b.csv", "a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"a.csv.zip holds 2 files; pack one table in it"):
        read_table(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"a.csv.zip is damaged"):
        read_table(path)


def test_lines_of_text_and_what_is_none(tmp_path):
    path = tmp_path / "a.txt"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_bytes("grüße\n\n zwei \n".encode(encoding))
        assert read_lines(path) == ["grüße", "zwei"]
    path.write_bytes(b"\x00\x01model\n weights\n")
    with pytest.raises(ValueError, match=r"a\.txt is no text: it holds zero bytes"):
        read_lines(path)
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(path.read_bytes())
    with pytest.raises(ValueError, match="no text"):
        read_lines(tmp_path / "a.txt.gz")
