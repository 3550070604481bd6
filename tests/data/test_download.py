"""Downloads, from a server of our own: whole and right, or not at all."""

import gzip
import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from moiety.data import load_problem, named
from moiety.data.catalogue import Layout, Named
from moiety.data.download import download, unpack
from moiety.data.formats import idx
from moiety.data.published import File

DATA = bytes(range(256)) * 4096  # 1 MiB


def md5(data):
    return hashlib.md5(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """/good, /truncated (says more than it gives), /moved (to /good), /files/NAME; else 404."""

    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
            return
        data = {"/good": DATA, "/truncated": DATA, **self.files}.get(self.path)
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if self.path == "/truncated" else data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = HTTPServer(("127.0.0.1", 0), Handler)
    made.asked = []
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{made.server_port}"
    yield made
    made.shutdown()
    made.server_close()
    Handler.files = {}


@pytest.mark.parametrize("path", ["/good", "/moved"])
def test_a_good_file_arrives_whole(server, tmp_path, path):
    seen = []
    target = tmp_path / "new" / "file.bin"
    tick = lambda *step: seen.append(step)  # noqa: E731
    download(server.url + path, target, md5=md5(DATA), progress=tick)
    assert target.read_bytes() == DATA
    assert seen[-1] == ("file.bin", len(DATA), len(DATA))
    assert [p.name for p in target.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize(
    ("path", "sum", "said"),
    [
        ("/truncated", md5(DATA), "broke off"),
        ("/good", "0" * 32, f"another file than published .md5 {md5(DATA)}, not 0000"),
        ("/missing", md5(DATA), "answered 404 Not Found"),
    ],
)
def test_a_bad_answer_is_one_sentence_and_leaves_what_was_there(server, tmp_path, path, sum, said):
    target = tmp_path / "file.bin"
    target.write_bytes(b"old")
    with pytest.raises(ValueError, match=said) as raised:
        download(server.url + path, target, md5=sum)
    assert "\n" not in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file.bin"]
    assert target.read_bytes() == b"old"


def test_no_network_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9/x cannot be reached"):
        download("http://127.0.0.1:9/x", tmp_path / "x", md5="")
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_limit_is_not_taken(server, tmp_path):
    with pytest.raises(ValueError, match="more than 0 MiB; not taken"):
        download(server.url + "/good", tmp_path / "x", md5=md5(DATA), limit=1000)
    assert list(tmp_path.iterdir()) == []


# -- archives --------------------------------------------------------------------------------------


def pack(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_names_in_an_archive_never_become_paths(tmp_path):
    members = {"../../evil.bin": b"a", "/etc/other.bin": b"b", "unknown": b"c"}
    archive = pack(tmp_path / "a.tar.gz", members)
    inside = tmp_path / "deep" / "inside"
    unpack(archive, inside, {"evil.bin": md5(b"a"), "other.bin": md5(b"b")})
    assert sorted(p.name for p in inside.iterdir()) == ["evil.bin", "other.bin"]
    assert sorted(p.name for p in tmp_path.rglob("*.bin")) == ["evil.bin", "other.bin"]


@pytest.mark.parametrize(
    ("members", "options", "said"),
    [
        ({"x/a.bin": b"wrong"}, {}, "a.bin is not the file published"),
        ({"x/b.bin": b"right"}, {}, "lacks a.bin"),
        ({"x/a.bin": b"right"}, {"limit": 3}, "a.bin is larger than"),
    ],
)
def test_a_wrong_archive_is_refused(tmp_path, members, options, said):
    archive = pack(tmp_path / "a.tar.gz", members)
    with pytest.raises(ValueError, match=said):
        unpack(archive, tmp_path / "to", {"a.bin": md5(b"right")}, **options)


def test_half_an_archive_is_refused(tmp_path):
    archive = pack(tmp_path / "a.tar.gz", {"a.bin": np.random.default_rng(0).bytes(10**5)})
    archive.write_bytes(archive.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"a.tar.gz is no whole archive"):
        unpack(archive, tmp_path / "to", {"a.bin": ""})


# -- a set of our own, from the server to the problem ----------------------------------------------


def idx_file(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def tiny(server, monkeypatch, tmp_path):
    """A set like MNIST that the server has, a data folder and a cache that are empty."""
    draw = np.random.default_rng(0)
    files = []
    for start, rows in {"train": 60, "t10k": 20}.items():
        for what, array in {
            "images-idx3-ubyte": draw.integers(0, 256, (rows, 4, 4)),
            "labels-idx1-ubyte": np.arange(rows) % 2,
        }.items():
            data = idx_file(array)
            packed = gzip.compress(data)
            Handler.files[f"/{start}-{what}.gz"] = packed
            url = f"{server.url}/{start}-{what}.gz"
            files.append(File(f"{start}-{what}", (md5(data),), url, md5(packed)))
    read = idx(("odd", "even"), {"train": "train", "test": "t10k"})
    layouts = (Layout(("tiny", "Tiny/raw"), tuple(files), read),)
    made = Named("image", "a test", "60 + 20", "http://page.example", layouts, cited="here")
    monkeypatch.setitem(named.NAMED, "tiny", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MOIETY_DATA", raising=False)
    return tmp_path


def test_a_set_is_fetched_once_and_loaded(server, tiny):
    with pytest.raises(ValueError, match="tiny is not here; get it with: moiety data get tiny"):
        load_problem("tiny")
    assert server.asked == []  # loading alone asks nobody
    assert named.get("tiny") == tiny / "cache/moiety/tiny"
    assert len(server.asked) == 4
    problem = load_problem("tiny")
    assert [len(s) for s in problem.splits.values()] == pytest.approx([50, 10, 20], abs=3)
    assert problem.targets[0].classes == ["odd", "even"]
    named.get("tiny")
    assert len(server.asked) == 4


def test_a_download_that_failed_goes_on_where_it_stopped(server, tiny):
    lost = Handler.files.pop("/t10k-labels-idx1-ubyte.gz")
    with pytest.raises(ValueError, match=r"answered 404 .*; or put the files from http://page"):
        named.get("tiny", tiny / "data")
    assert named.find("tiny", tiny / "data") is None
    Handler.files["/t10k-labels-idx1-ubyte.gz"] = lost
    named.get("tiny", tiny / "data")
    assert len(server.asked) == 5
    assert load_problem("tiny", data_dir=tiny / "data").shape == (1, 4, 4)


def test_the_folder_asked_for_comes_first_then_the_variable_then_the_cache(tiny, monkeypatch):
    cache = named.get("tiny")
    assert named.find("tiny").folder == cache
    public = tiny / "mine" / "Tiny" / "raw"
    public.mkdir(parents=True)
    for path in cache.iterdir():  # unpacked, in the other layout
        (public / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    monkeypatch.setenv("MOIETY_DATA", str(tiny / "mine"))
    assert named.find("tiny").folder == public
    assert named.find("tiny", tiny / "nowhere").folder == public
    assert len(load_problem("tiny").test) == 20
    named.get("tiny", tiny / "mine")
    assert named.find("tiny", tiny / "cache" / "moiety").folder == cache


def test_a_changed_file_is_noticed(tiny):
    path = named.get("tiny") / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))
    load_problem("tiny")  # packed by somebody else, the same inside
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"\1\0"))
    with pytest.raises(ValueError, match="is not the published file"):
        load_problem("tiny")


def test_a_file_known_only_as_packed_is_checked_as_packed(tmp_path, monkeypatch):
    packed = gzip.compress(idx_file(np.arange(40) % 2))
    images = gzip.compress(idx_file(np.arange(640).reshape(40, 4, 4) % 251))
    files = (
        File("t10k-images-idx3-ubyte", packed=md5(images)),
        File("t10k-labels-idx1-ubyte", packed=md5(packed)),
    )
    layouts = (Layout(("tiny",), files, idx(("odd", "even"), {"test": "t10k"})),)
    made = Named("image", "a test", "40", "http://page.example", layouts)
    monkeypatch.setitem(named.NAMED, "tiny", made)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/t10k-images-idx3-ubyte.gz").write_bytes(images)
    labels = tmp_path / "tiny/t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(packed)
    assert len(load_problem("tiny", data_dir=tmp_path).train) > 20
    labels.write_bytes(gzip.compress(idx_file(np.arange(40) % 2), 1))
    with pytest.raises(ValueError, match="is not the published file"):
        load_problem("tiny", data_dir=tmp_path)
