"""Train tiny-agent's byte-level BPE: 8192 ids, the chat tokens last.

python -m atlas_jax.train.tokenizer --conversations tau_airline.jsonl --docs SITE_PACKAGES...
"""

import argparse
import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from atlas_jax.train.conversations import derive_tools, held_out, load_conversations
from atlas_jax.train.sources import docstrings, packages, stdlib

ASSETS = pathlib.Path(__file__).parent.parent / "data" / "tiny_agent"

VOCAB = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
SPECIAL += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
CONTROL = SPECIAL[:3]  # dropped by skip_special_tokens; the tags are text that parsers must see
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(texts) -> Tokenizer:
    """A BPE over bytes: words with their leading space, single digits, runs of punctuation."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    assert tok.get_vocab_size() == VOCAB - len(SPECIAL), tok.get_vocab_size()
    return add_chat_tokens(tok)


def add_chat_tokens(tok: Tokenizer) -> Tokenizer:
    """Append the chat tokens, marking only the control ones special."""
    blob = json.loads(tok.to_str())
    blob["added_tokens"] = [
        dict(
            id=VOCAB - len(SPECIAL) + i,
            content=s,
            single_word=False,
            lstrip=False,
            rstrip=False,
            normalized=False,
            special=s in CONTROL,
        )
        for i, s in enumerate(SPECIAL)
    ]
    return Tokenizer.from_str(json.dumps(blob))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--conversations", required=True)
    p.add_argument("--docs", nargs="*", default=[])
    a = p.parse_args()
    out = ASSETS
    talks = load_conversations(a.conversations)
    tools = derive_tools(talks)
    (out / "airline_tools.json").write_text(json.dumps(tools, indent=1) + "\n")
    hold = set(held_out(talks))

    def body(m):
        return m["content"] + "".join(json.dumps(c["function"], indent=0) for c in m.get("tool_calls", ()))

    chat = [body(m) for i, messages in talks.items() if i not in hold for m in messages[1:]]
    chat = (chat + [next(iter(talks.values()))[0]["content"], json.dumps(tools)] * 2) * 4
    code = [text for _, text in stdlib()][::3]
    docs = []
    for site in map(pathlib.Path, a.docs):
        for _, _, roots in packages(site):
            docs += [d for r in roots for d in docstrings(r)][:60]
    print("chars", sum(map(len, chat)), sum(map(len, code)), sum(map(len, docs)))
    tok = train([*chat, *code, *docs])
    tok.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
