"""A checkpoint folder, without a framework: values round trip, damage is named, a killed writer leaves one whole."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nearlinear.checkpoint import folder, streams
from nearlinear.checkpoint.documents import decode, encode
from nearlinear.checkpoint.tensors import ITEM_BYTES, Array, chunks, parse
from nearlinear.checkpoint.together import Alone, Change, change_all, on_all
from nearlinear.errors import CheckpointError, InputError

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks writers and kills them")

# ---- values ----

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8", "c16"]
numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none())
arrays_strategy = st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0)))
scalars = arrays_strategy.filter(lambda a: a.size).map(lambda a: a.reshape(-1)[0])
leaves = st.one_of(numbers, st.text(), st.binary(max_size=20), arrays_strategy, scalars)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.just("@")), inner, max_size=4),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type, content and, for arrays, bits; nan equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(k) is type(m) and same(a[k], b[m]) for k, m in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b) and str(a) == str(b)


def there_and_back(value: Any) -> Any:
    arrays: dict[str, Array] = {}
    document = json.loads(json.dumps(encode(value, "extra['x']", ("x",), arrays), allow_nan=False))
    return decode(document, parse(memoryview(b"".join(chunks(arrays, {}))), "x"), lambda array: array)


@settings(max_examples=60)
@given(values)
def test_any_value_comes_back_with_its_types(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_other_kinds_of_dict_come_back_as_dict() -> None:
    assert same(there_and_back(OrderedDict(a=1)), {"a": 1})


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (print, "extra['x'] is a builtin_function_or_method; save its numbers"),
        ({"a": [1, (2, Odd())]}, "extra['x']['a'][1][1] is an Odd; save its numbers"),
        ({"a": {3, 4}}, "extra['x']['a'] is a set; save its numbers"),
        ({(1, 2): 3}, "extra['x'] has the key (1, 2), a tuple; keys are strings or ints"),
        ({True: 3}, "extra['x'] has the key True, a bool; keys are strings or ints"),
        (Path("a"), "extra['x'] is a PosixPath; save its numbers"),
        (namedtuple("Point", "x y")(1, 2), "extra['x'] is a Point; save its numbers"),
        (np.array(["a"]), "extra['x'] is NumPy's <U1; save it as numbers"),
        (np.array([None]), "extra['x'] is NumPy's object; save it as numbers"),
        (np.ma.masked_array([1.0], [True]), "extra['x'] is a MaskedArray; save plain arrays"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        there_and_back(value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_that_contains_itself_is_an_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="does it contain itself"):
        there_and_back(endless)


# ---- files ----


def ramp(start: int, n: int = 6) -> Array:
    values = np.arange(start, start + n, dtype="<f4")
    return Array("F32", values.shape, lambda: values.view(np.uint8).data)


def test_the_safetensors_library_opens_our_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    arrays: dict[str, Array] = {}
    value = {dtype: np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES if dtype != "c16"}
    encode({**value, "none": np.zeros((0, 3))}, "x", (), arrays)
    (tmp_path / "x.safetensors").write_bytes(b"".join(chunks(arrays, {"format": "pt"})))
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        for dtype, expected in value.items():
            if dtype != "c8":  # its own NumPy side does not know complex numbers
                assert same(file.get_tensor(dtype), expected), dtype
        assert file.get_tensor("none").shape == (0, 3)


def test_we_open_the_safetensors_librarys_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file({"a": np.arange(6.0).reshape(2, 3), "b": np.array(True)}, tmp_path / "x.safetensors")
    arrays = parse(memoryview((tmp_path / "x.safetensors").read_bytes()), "x")
    assert (arrays["a"].dtype, arrays["a"].shape, arrays["b"].dtype, arrays["b"].shape) == ("F64", (2, 3), "BOOL", ())
    assert bytes(arrays["a"].data()) == np.arange(6.0).tobytes()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(DTYPES), max_size=8))
def test_every_array_starts_at_a_multiple_of_its_items_size(dtypes: list[str]) -> None:
    # Reading a complex128 in place from a multiple of 8 killed the process.
    arrays: dict[str, Array] = {}
    encode([np.ones(3, dtype) for dtype in dtypes], "x", ("x",), arrays)
    file = b"".join(chunks(arrays, {}))
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:start])
    for name, array in arrays.items():
        assert (start + header[name]["data_offsets"][0]) % ITEM_BYTES[array.dtype] == 0


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_types_that_numpy_lacks_go_through_as_bytes(dtype: str) -> None:
    count = 3
    payload = bytes(range(count * (2 if dtype == "BF16" else 1)))
    arrays = parse(memoryview(b"".join(chunks({"w": Array(dtype, (count,), lambda: payload)}, {}))), "x")
    assert (arrays["w"].dtype, arrays["w"].shape, bytes(arrays["w"].data())) == (dtype, (count,), payload)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 400]}}, "bytes 0 to 400 of 8"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, "bytes 0 to 8 of 8"),
        ({"w": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}, "numbers of type F3, unknown here"),
        ({"w": [1]}, "not a safetensors file"),
        ([1], "not a safetensors file"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(header: Any, message: str) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=message):
        parse(memoryview(len(text).to_bytes(8, "little") + text + bytes(8)), "x.safetensors")


# ---- folders ----


def put(path: Path, generation: int) -> None:
    arrays = {"model": {"w": ramp(generation), "b": ramp(-generation, 0)}, "extra": {}}
    folder.write(path, arrays, {"state": {"generation": generation}}, {"format": "pt"})


def generation_at(path: Path) -> int:
    """Return which checkpoint is at ``path``, after a look that its parts belong together."""
    contents = folder.read(path)
    generation = int(contents.documents["state"]["generation"])
    assert bytes(contents.arrays["model"]["w"].data()) == bytes(ramp(generation).data())
    return generation


FILES = ["checkpoint.json", "extra.safetensors", "model.safetensors", "state.json"]


def listing(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_folder_holds_the_plain_names_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path / "new" / "ckpt", 1)
    assert listing(tmp_path / "new") == ["ckpt"]
    assert listing(tmp_path / "new" / "ckpt") == FILES
    put(tmp_path / "new" / "ckpt", 2)
    assert listing(tmp_path / "new") == ["ckpt"]
    assert listing(tmp_path / "new" / "ckpt") == FILES
    assert generation_at(tmp_path / "new" / "ckpt") == 2


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    (tmp_path / "a").rename(tmp_path / "b")
    assert generation_at(tmp_path / "b") == 1


def test_a_save_keeps_what_else_is_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    put(tmp_path, 1)
    put(tmp_path, 2)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert listing(tmp_path) == sorted([*FILES, "notes.txt"])


def test_a_save_with_fewer_groups_removes_the_files_of_the_others(tmp_path: Path) -> None:
    put(tmp_path / "c", 1)
    folder.write(tmp_path / "c", {"model": {}}, {})
    assert listing(tmp_path / "c") == ["checkpoint.json", "model.safetensors"]


def test_a_save_does_not_overwrite_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("somebody else's")
    with pytest.raises(InputError, match=r"its model\.safetensors belongs to no checkpoint; choose another path"):
        put(tmp_path, 1)
    (tmp_path / "model.safetensors").rename(tmp_path / "checkpoint.json")
    with pytest.raises(InputError, match=r"cannot save over it: .*choose another path"):
        put(tmp_path, 1)
    assert listing(tmp_path) == ["checkpoint.json"]
    assert (tmp_path / "checkpoint.json").read_text() == "somebody else's"


def test_the_bytes_of_a_read_checkpoint_outlive_a_later_save(tmp_path: Path) -> None:
    put(tmp_path / "c", 1)
    contents = folder.read(tmp_path / "c")
    put(tmp_path / "c", 2)
    assert bytes(contents.arrays["model"]["w"].data()) == bytes(ramp(1).data())
    assert contents.identity != folder.read(tmp_path / "c").identity


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", [name for name in FILES if name != "checkpoint.json"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "bytes and was written with .* bytes?|was written with"),
        (flip, "is damaged: its bytes are not those that were written"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    put(tmp_path / "c", 1)
    damage(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=message) as error:
        folder.read(tmp_path / "c")
    assert str(tmp_path / "c" / name) in str(error.value)
    assert str(error.value).endswith("copy the folder again, or load another checkpoint")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_manifest_is_found_or_harmless(tmp_path: Path, at: float, bit: int) -> None:
    path = tmp_path / "c"
    if not path.exists():
        put(path, 1)
    whole = (path / "checkpoint.json").read_bytes()
    damaged = bytearray(whole)
    damaged[int(at * len(whole))] ^= 1 << bit
    (path / "checkpoint.json").write_bytes(damaged)
    try:
        assert generation_at(path) == 1
    except CheckpointError as error:
        assert "\n" not in str(error)
    finally:
        (path / "checkpoint.json").write_bytes(whole)


def test_another_format_version_is_named(tmp_path: Path) -> None:
    put(tmp_path / "c", 1)
    manifest = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    (tmp_path / "c" / "checkpoint.json").write_text(json.dumps({**manifest, "version": 7}))
    with pytest.raises(CheckpointError, match="format version 7 and this nearlinear reads 1"):
        folder.read(tmp_path / "c")


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    put(tmp_path / "c", 1)
    manifest = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    manifest["files"]["../secret.json"] = {"bytes": 0, "sha256": ""}
    (tmp_path / "c" / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is damaged"):
        folder.read(tmp_path / "c")


def test_no_checkpoint_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist on"):
        folder.read(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"the folder has no checkpoint\.json"):
        folder.read(tmp_path)
    (tmp_path / "f").write_text("x")
    with pytest.raises(CheckpointError, match="it is a file and a checkpoint is a folder"):
        folder.read(tmp_path / "f")
    with pytest.raises(InputError, match="it is a file and a checkpoint is a folder"):
        put(tmp_path / "f", 1)
    with pytest.raises(CheckpointError, match=r"File exists: .*/f; a checkpoint"):
        put(tmp_path / "f" / "c", 1)


# ---- a writer that dies, or that the disk refuses ----

HEAD = """
import io, json, os, resource, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import generation_at, listing, put
from nearlinear.checkpoint import folder
from nearlinear.errors import CheckpointError, InputError
where = Path(sys.argv[2])
"""

# A process for each k: killed in place of its k-th call of the file system, or interrupted just after it.
STEPS = """
os.fsync = lambda descriptor: None  # slow, and idle here: what a killed process wrote is with the kernel already
LOOKS = ("fspath", "stat", "lstat", "fstat", "listdir", "scandir", "urandom", "tell", "fileno")

def at_call(k, moment, act):
    calls = 0
    def profile(frame, event, function):
        nonlocal calls
        if event != moment or function.__name__ in LOOKS:
            return
        module, owner = getattr(function, "__module__", None), getattr(function, "__self__", None)
        if module in ("posix", "_io", "io") or isinstance(owner, io.IOBase):
            calls += 1
            if calls == k:
                sys.setprofile(None)
                act()
    sys.setprofile(profile)

def interrupt():
    raise KeyboardInterrupt

def writer(k, path, how):
    if how == "kill":
        at_call(k, "c_call", lambda: os.kill(os.getpid(), signal.SIGKILL))
        put(path, 2)
    else:
        at_call(k, "c_return", interrupt)
        try:
            put(path, 2)
        except KeyboardInterrupt:
            sys.setprofile(None)
            os._exit(3)
    sys.setprofile(None)
    os._exit(0)

how, old = sys.argv[3], sys.argv[4] == "old"
k, ended, seen = 0, None, []
while ended != 0:
    k += 1
    parent = where / str(k)
    parent.mkdir()
    path = parent / "ckpt"
    if old:
        put(path, 1)
    child = os.fork()
    if child == 0:
        try:
            writer(k, path, how)
        finally:
            os._exit(4)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, 3, -signal.SIGKILL), ended
    found = generation_at(path) if path.exists() else 0
    left = [name for name in listing(parent) if name != "ckpt"] + ([] if not path.exists() else
            [name for name in listing(path) if name.endswith(".part")])
    put(path, 3)
    whole = generation_at(path) == 3
    clean = listing(parent) == ["ckpt"] and len(listing(path)) == 4
    seen.append([ended, found, len(left), whole, clean])
    shutil.rmtree(parent)
print(json.dumps(seen))
"""


def run(script: str, *arguments: object) -> Any:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script), here, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@unix
@pytest.mark.parametrize(("before", "old"), [("new", 0), ("old", 1)])
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_writer_that_ends_at_any_step_leaves_one_whole_checkpoint(
    tmp_path: Path, how: str, before: str, old: int
) -> None:
    seen = run(STEPS, tmp_path, how, before)
    assert len(seen) > 30  # it did go through the steps
    found = [generation for _, generation, _, _, _ in seen]
    assert found[0] == old, seen
    assert found[-1] == 2
    assert found == sorted(found)  # there is one step before which it is the old one, and after which the new one
    assert set(found) == {old, 2}
    assert all(whole and clean for _, _, _, whole, clean in seen)  # the next save works, and tidies up
    if how == "kill":
        assert any(left for _, found, left, _, _ in seen if found == old)  # there was something to tidy up


def test_what_a_killed_writer_left_is_removed_before_the_next_begins(tmp_path: Path) -> None:
    left_overs = [tmp_path / ".new.00000000.part", tmp_path / ".new.x.00000000.part", tmp_path / "old" / "w.0.part"]
    put(tmp_path / "old", 1)
    for left_over in left_overs[:2]:
        left_over.mkdir()
    (tmp_path / "old" / "w.00000000.part").write_text("x")
    left_overs[2].write_text("x")
    seen = []

    def data() -> bytes:
        seen.append([listing(tmp_path), listing(tmp_path / "old")])
        return b"x"

    for name in ("new", "old"):
        folder.write(tmp_path / name, {"model": {"w": Array("U8", (1,), data)}}, {})
    assert [".new.00000000.part" in there for there, _ in seen] == [False, False]
    assert ["w.00000000.part" in there for _, there in seen] == [True, False]
    assert left_overs[1].exists()  # another path's
    assert left_overs[2].exists()  # not ours


@unix
def test_files_reach_the_disk_before_their_manifest_is_named(tmp_path: Path) -> None:
    order = run(
        """
        order = []
        def profile(frame, event, function):
            if event == "c_call" and getattr(function, "__name__", "") in ("fsync", "replace", "rename"):
                order.append(function.__name__)
        put(where / "c", 1)
        sys.setprofile(profile)
        put(where / "c", 2)
        sys.setprofile(None)
        print(json.dumps(order[order.index("fsync"):]))
        """,
        tmp_path,
    )
    # After settling what an older save left: three files, the manifest, the folder; then the manifest's name; then
    # the folder again, the files' names, and the folder.
    assert order[-11:] == ["fsync"] * 5 + ["replace", "fsync"] + ["replace"] * 3 + ["fsync"]


@unix
@pytest.mark.parametrize(("before", "old"), [("new", 0), ("old", 1)])
def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path: Path, before: str, old: int) -> None:
    message, found, names = run(
        """
        path = where / "ckpt"
        if sys.argv[3] == "old":
            put(path, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # no file may be longer: the write fails half-way
        message = ""
        try:
            put(path, 2)
        except CheckpointError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        found = generation_at(path) if path.exists() else 0
        print(json.dumps([message, found, listing(where) + (listing(path) if path.exists() else [])]))
        """,
        tmp_path,
        before,
    )
    assert "File too large (it needs 24 B, " in message
    assert message.endswith("a checkpoint that was there is still whole; make room or choose another path")
    assert found == old
    assert names == (["ckpt", *FILES] if old else [])


@unix
def test_a_folder_without_permission_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path / "ckpt", 1)
    for file in (tmp_path / "ckpt").iterdir():
        file.chmod(0o644)
    (tmp_path / "ckpt").chmod(0o555)
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o011 != 0o011 and len(parent.parts) > 2:
            parent.chmod(parent.stat().st_mode | 0o011)
    try:
        messages = run(
            """
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            messages = []
            for path in (where / "ckpt", where / "other"):
                try:
                    put(path, 2)
                except CheckpointError as error:
                    messages.append(str(error))
            print(json.dumps(messages))
            """,
            tmp_path,
        )
    finally:
        tmp_path.chmod(0o755)
        (tmp_path / "ckpt").chmod(0o755)
    assert len(messages) == 2
    assert all(
        "Permission denied" in message and "a checkpoint that was there is still whole" in message
        for message in messages
    )
    assert generation_at(tmp_path / "ckpt") == 1
    assert listing(tmp_path) == ["ckpt"]


@unix
def test_a_reader_sees_whole_checkpoints_while_another_process_saves(tmp_path: Path) -> None:
    put(tmp_path / "c", 0)
    here = str(Path(__file__).parent)
    script = HEAD + "for generation in range(1, 30): put(where, generation)"
    with subprocess.Popen([sys.executable, "-c", script, here, str(tmp_path / "c")]) as writer:
        seen = []
        while writer.poll() is None:
            seen.append(generation_at(tmp_path / "c"))
    assert writer.returncode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert generation_at(tmp_path / "c") == 29


@unix
@pytest.mark.parametrize("there", [False, True])
def test_several_writers_at_one_place_take_turns(tmp_path: Path, there: bool) -> None:
    if there:
        put(tmp_path / "c", 0)
    here = str(Path(__file__).parent)
    script = HEAD + "for generation in range(1, 20): put(where, generation)"
    command = [sys.executable, "-c", script, here, str(tmp_path / "c")]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [writer.communicate()[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], errors
    assert generation_at(tmp_path / "c") == 19
    assert listing(tmp_path) == ["c"]


# ---- random streams and ranks ----


def test_pythons_and_numpys_streams_go_on_where_they_were() -> None:
    import random

    random.seed(1)
    np.random.seed(1)
    random.gauss(0, 1), np.random.normal()  # each leaves a second number behind
    saved = json.loads(json.dumps(streams.capture(), allow_nan=False))
    expected = random.gauss(0, 1), random.random(), np.random.normal(), np.random.random()
    streams.reseed(5)
    streams.restore(saved)
    assert (random.gauss(0, 1), random.random(), np.random.normal(), np.random.random()) == expected


def test_a_rank_without_a_stream_gets_one_of_its_own() -> None:
    saved = streams.capture()
    seeds = [streams.derived_seed(saved, rank) for rank in range(20)]
    assert len(set(seeds)) == 20
    assert seeds == [streams.derived_seed(json.loads(json.dumps(saved)), rank) for rank in range(20)]
    assert all(0 <= seed < 2**63 for seed in seeds)


class _Two:
    """Rank 0 of two, whose rank 1 says what the test lets it say."""

    rank, size = 0, 2

    def __init__(self, other: Any) -> None:
        self.other = other

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        return [value, self.other]


def test_a_failure_on_another_rank_is_raised_here_too() -> None:
    with pytest.raises(CheckpointError, match="saving x failed on rank 1: OSError: no disk"):
        on_all(_Two("OSError: no disk"), "saving x", lambda: None)
    assert on_all(_Two(None), "saving x", lambda: 3) == 3
    assert on_all(Alone(), "saving x", lambda: 3) == 3


@pytest.mark.parametrize("ranks", [Alone(), _Two(None)])
def test_a_failed_change_takes_back_those_before_it(ranks: Any) -> None:
    state = {"a": 1, "b": 1}

    def change(key: str, fails: bool) -> Change:
        def remember() -> Callable[[], None]:
            before = state[key]
            return lambda: state.update({key: before})

        def apply() -> None:
            state[key] = 2
            if fails:
                raise ValueError("no")

        return Change(remember, apply)

    with pytest.raises(ValueError, match="no"):
        change_all(ranks, "loading x", [change("a", False), change("b", True)])
    assert state == {"a": 1, "b": 1}
    change_all(ranks, "loading x", [change("a", False), change("b", False)])
    assert state == {"a": 2, "b": 2}


def test_a_failed_change_elsewhere_takes_back_the_ones_here() -> None:
    state = [1]
    change = Change(lambda: lambda: state.append(1), lambda: state.append(2))
    with pytest.raises(CheckpointError, match="rank 1: no"):
        change_all(_Two("no"), "loading x", [change])
    assert state == [1, 2, 1]
