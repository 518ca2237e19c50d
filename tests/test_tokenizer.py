import json
import pathlib
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import atlas_jax.text.tokenizer
from atlas_jax.errors import CheckpointError, RequestError
from atlas_jax.text.tokenizer import Tokenizer, load_tokenizer

TINY = pathlib.Path(atlas_jax.text.tokenizer.__file__).parent.parent / "data" / "tiny_agent"
tokenizer = Tokenizer(TINY)


def pieces(ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_what_the_files_say():
    assert tokenizer.vocab_size == 8192
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.token_id("<|im_end|>") == 8185 and tokenizer.token_id("no such token") is None
    assert set(tokenizer.templates) == {"default"}


@given(st.text())
def test_text_survives(text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_ids_and_can_be_skipped():
    ids = tokenizer.encode("<|im_start|>hi<|im_end|><think>")
    assert ids[0] == 8184 and ids[-2:] == [8185, tokenizer.token_id("<think>")]
    assert tokenizer.decode(ids) == "hi<think>"


@given(st.lists(st.integers(0, 8200), max_size=40), st.booleans())
def test_streamed_pieces_join_to_the_text(ids, skip):
    got = pieces(ids, skip_special_tokens=skip)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", exclude_categories=("Cs",))))
def test_no_piece_holds_half_a_character(text):
    got = pieces(tokenizer.encode(text), skip_special_tokens=False)
    assert "".join(got) == text and not any("\ufffd" in piece for piece in got)
    assert got[-1] == ""


def test_characters_of_many_tokens():
    ids = tokenizer.encode("👩‍🚀 שלום 数据")
    assert len(ids) > 12
    got = pieces(ids)
    assert "".join(got) == "👩‍🚀 שלום 数据" and got.count("") > 3


def test_invalid_bytes_are_not_held_back():
    start = tokenizer.encode("数")[0]  # the first byte or bytes of a character
    got = pieces([start] * 20)
    assert "".join(got[:-1]).count("\ufffd") >= 19 and "".join(got) == tokenizer.decode([start] * 20)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="cannot be encoded"):
        tokenizer.encode("\ud800")


def copy(directory: pathlib.Path, *names: str) -> pathlib.Path:
    for name in names:
        shutil.copyfile(TINY / name, directory / name)
    return directory


def test_a_model_without_a_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(CheckpointError, match="give prompts as token ids"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_alone(tmp_path):
    alone = load_tokenizer(copy(tmp_path, "tokenizer.json"))
    assert alone is not None and alone.templates == {} and alone.special_tokens == {}


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    data = json.loads((TINY / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    text = "several words in a row"
    assert Tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


def test_where_templates_come_from(tmp_path):
    copy(tmp_path, "tokenizer.json")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<e>", "special": True}, "chat_template": "one"}))
    assert Tokenizer(tmp_path).templates == {"default": "one"}
    assert Tokenizer(tmp_path).special_tokens == {"eos_token": "<e>"}
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]})
    )
    assert Tokenizer(tmp_path).templates == {"default": "a", "rag": "b"}
    config.write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(CheckpointError, match="list of named templates"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    assert Tokenizer(tmp_path).templates == {"default": "file", "rag": "more"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat template cannot be read"):
        Tokenizer(tmp_path)
