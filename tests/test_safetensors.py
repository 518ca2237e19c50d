import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from atlas_jax.errors import CheckpointError
from atlas_jax.weights.checkpoint import Checkpoint
from atlas_jax.weights.safetensors import DTYPES, SafetensorsFile


def encode(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_all(path: pathlib.Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.entries}


def test_reads_what_the_library_wrote(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 4), np.int32),
        "bytes": rng.integers(0, 255, (3, 1), np.uint8),
        "flag": np.array([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(file.entries) == set(tensors)
    for name, expected in tensors.items():
        got = file.read(name)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)
        file.release(name)
        np.testing.assert_array_equal(got, expected)  # a view outlives the release
        assert not got.flags.writeable
    with pytest.raises(CheckpointError, match="has no tensor 'c'"):
        file.read("c")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_its_size(tmp_path, dtype):
    count = 16
    raw = bytes(range(DTYPES[dtype].bits * count // 8)) if dtype != "BOOL" else bytes([0, 1] * (count // 2))
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"x": entry(dtype, [2, 8], [0, len(raw)])}, raw))
    (value,) = read_all(path).values()
    assert value.shape == (2, 8) and value.dtype == DTYPES[dtype].numpy
    if dtype != "F4":
        assert value.tobytes() == raw


def test_four_bit_floats_are_unpacked_low_half_first(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"x": entry("F4", [1, 4], [0, 2])}, bytes([0x21, 0xF7])))
    np.testing.assert_array_equal(read_all(path)["x"].astype(np.float32), [[0.5, 1.0, 6.0, -6.0]])


def test_unaligned_data_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    raw = np.arange(2, dtype=np.float32).tobytes()
    path.write_bytes(encode({"b": entry("U8", [1], [0, 1]), "x": entry("F32", [2], [1, 9])}, b"\7" + raw))
    np.testing.assert_array_equal(read_all(path)["x"], [0.0, 1.0])


EIGHT = b"\0" * 8
TWICE = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
DAMAGED = {
    "0 bytes are no": b"",
    "7 bytes are no": b"1234567",
    "ends within its header": encode({"x": entry()}, length=10_000),
    "are allowed": encode({}, length=1 << 40),
    "not valid JSON": encode(b"{"),
    "not valid JSON (": encode(b"\xff\xfe{}"),
    "JSON object is needed": encode([]),
    "the key 'x' is there twice": encode(TWICE, EIGHT),
    "__metadata__ must": encode({"__metadata__": {"a": 1}}),
    "needs dtype, shape and data_offsets": encode({"x": {"dtype": "F32"}}),
    "unknown dtype 'F6_E2M3'": encode({"x": entry("F6_E2M3")}, EIGHT),
    "unknown dtype 3": encode({"x": entry(3)}, EIGHT),
    "shape must": encode({"x": entry(shape=[-2])}, EIGHT),
    "shape must be": encode({"x": entry(shape=[True, 2])}, EIGHT),
    "too large": encode({"x": entry(shape=[0, 1 << 40, 1 << 40], offsets=[0, 0])}),
    "two natural numbers": encode({"x": entry(offsets=[0, 8, 9])}, EIGHT),
    "are not within": encode({"x": entry(offsets=[0, 16])}, EIGHT),
    "are not within the": encode({"x": entry(offsets=[8, 0])}, EIGHT),
    "takes 12 bytes": encode({"x": entry(shape=[3])}, EIGHT),
    "takes 1.5 bytes": encode({"x": entry("F4", [3], [0, 2])}, b"\0\0"),
    "overlaps": encode({"x": entry(), "y": entry(offsets=[4, 12])}, EIGHT + b"1234"),
    "before tensor 'y' belong to none": encode({"x": entry(), "y": entry(offsets=[9, 17])}, EIGHT * 2 + b"1"),
    "behind the last tensor": encode({"x": entry()}, EIGHT * 2),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damage_is_named(tmp_path, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(DAMAGED[message])
    with pytest.raises(CheckpointError) as error:
        read_all(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="directory"):
        SafetensorsFile(tmp_path)


VALID = encode(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 1], [0, 8]),
        "b": entry("BF16", [3], [8, 14]),
        "c": entry("F4", [2, 3], [14, 17]),
        "d": entry("I64", [0, 5], [17, 17]),
    },
    bytes(range(17)),
)


@st.composite
def mutations(draw) -> bytes:
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from("set insert cut truncate digit".split())):
            case "set" if data:
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=6))
            case "cut":
                del data[at : at + draw(st.integers(1, 6))]
            case "truncate":
                del data[at:]
            case "digit":
                digits = [i for i, byte in enumerate(data[8:], 8) if chr(byte).isdigit()]
                if digits:
                    data[draw(st.sampled_from(digits))] = draw(st.sampled_from(b'0123456789-.eE"[]{},'))
    return bytes(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
descriptions = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(DTYPES)) | json_values,
        "shape": st.lists(st.integers(0, 4) | st.integers(0, 1 << 80), max_size=40) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
    }
)
headers = st.builds(
    encode, st.dictionaries(st.text(max_size=4), descriptions | json_values, max_size=3), st.binary(max_size=40)
)


@given(mutations() | headers | st.binary(max_size=64))
def test_no_bytes_raise_anything_but_checkpoint_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_all(path)
    except CheckpointError as error:
        assert "fuzz.safetensors" in str(error)
    else:
        for value in tensors.values():
            value.tobytes()


def sharded(directory: pathlib.Path, where: dict[str, str] | None = None) -> None:
    save_file({"a": np.ones(2, np.float32)}, directory / "one.safetensors")
    save_file({"mtp.b": np.zeros(3, np.float32)}, directory / "model-mtp.safetensors")
    index = {"weight_map": where or {"a": "one.safetensors", "mtp.b": "model-mtp.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_checkpoint(tmp_path):
    sharded(tmp_path)
    save_file({"z": np.ones(1, np.float32)}, tmp_path / "other.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.entries) == {"a", "mtp.b"}
    assert checkpoint.unlisted == ["other.safetensors"]
    np.testing.assert_array_equal(checkpoint.read("mtp.b"), np.zeros(3))
    checkpoint.release("mtp.b")
    with pytest.raises(CheckpointError, match="no tensor 'z'"):
        checkpoint.read("z")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": "one.safetensors", "mtp.b": "two.safetensors"}, "not there: two.safetensors"),
        ({"a": "model-mtp.safetensors", "mtp.b": "model-mtp.safetensors"}, "not in a shard: a in model-mtp"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "lists tensors that are not in a shard: b in one"),
        ({"mtp.b": "model-mtp.safetensors", "a": "../one.safetensors"}, "does not name a safetensors file"),
        ({"a": "/etc/one.safetensors"}, "does not name a safetensors file"),
        ({"a": "folder\\one.safetensors"}, "does not name a safetensors file"),
        ({"a": "one.safetensors\0"}, "does not name a safetensors file"),
        ({"a": "one.bin"}, "does not name a safetensors file"),
        ({"a": 3}, "weight_map must map"),
        ({"a": ["one.safetensors"]}, "weight_map must map"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(tmp_path, where, message):
    sharded(tmp_path, where)
    with pytest.raises(CheckpointError, match=r"index\.json") as error:
        Checkpoint(tmp_path)
    assert message in str(error.value)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path):
    sharded(tmp_path)
    save_file({"a": np.ones(2, np.float32), "extra": np.ones(2, np.float32)}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="does not list tensors that are in a shard: extra in one"):
        Checkpoint(tmp_path)


def test_an_ambiguous_or_empty_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="download the weights"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin: convert"):
        Checkpoint(tmp_path)
    sharded(tmp_path)
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="whichever is out of date"):
        Checkpoint(tmp_path)


def test_agrees_with_the_library_on_a_sharded_checkpoint():
    folder = pathlib.Path(__file__).parent / "data" / "parity_small"
    checkpoint = Checkpoint(folder)
    for path in sorted(folder.glob("model*.safetensors")):
        for name, expected in load_file(path).items():
            np.testing.assert_array_equal(checkpoint.read(name).view(np.uint8), expected.view(np.uint8))
