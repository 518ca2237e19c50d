"""Frozen configuration: what a model is (`ModelConfig`) and how it is run (`RunConfig`).

Field names of `ModelConfig` are those of Hugging Face's `config.json`, so that a reader of one can read the other.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Literal

from atlas_jax.errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"
# What a server can compile before it starts: dispatches of requests that ask for nothing besides, for log-probabilities, for a
# grammar (for both where both are named), and scores.
WARM_UPS = ("answers", "logprobs", "grammars", "scores")
DRAFTER_CONTEXTS = ("full", "prefill_only", "blind")
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape and semantics of a hybrid (Gated DeltaNet + attention) decoder and its multi-token-prediction head.

    `num_experts == 0` means a dense feed-forward of `intermediate_size`; otherwise every layer routes to
    `num_experts_per_tok` experts of `moe_intermediate_size` and adds a gated shared expert.
    `mtp_hidden` says which of the target's hidden states the drafter reads: after the final norm (how the
    heads are trained) or before it (for comparison).

    Raises:
        ConfigError: a combination that no published model uses and this runtime does not compute.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 262144
    mtp_num_hidden_layers: int = 0
    mtp_hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        def refuse(condition: bool, message: str) -> None:
            if condition:
                raise ConfigError(f"{self.model_type}: {message}")

        refuse(self.model_type not in MODEL_TYPES, f"unknown model_type; known: {', '.join(MODEL_TYPES)}")
        unknown = sorted(set(self.layer_types) - {LINEAR, FULL})
        refuse(bool(unknown), f"unknown layer types {unknown}; known: {LINEAR}, {FULL}")
        refuse(LINEAR not in self.layer_types, f"at least one {LINEAR} layer is needed")
        refuse(FULL not in self.layer_types, f"at least one {FULL} layer is needed")
        refuse(self.mtp_num_hidden_layers not in (0, 1), "mtp_num_hidden_layers must be 0 or 1")
        refuse(self.mtp_hidden not in ("post_norm", "pre_norm"), "mtp_hidden must be post_norm or pre_norm")
        refuse(self.linear_conv_kernel_dim < 2, "linear_conv_kernel_dim must be at least 2")
        for name in (
            "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim linear_num_key_heads "
            "linear_num_value_heads linear_key_head_dim linear_value_head_dim max_position_embeddings"
        ).split():
            refuse(getattr(self, name) < 1, f"{name} must be at least 1, got {getattr(self, name)}")
        refuse(
            self.num_attention_heads % self.num_key_value_heads != 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
        refuse(
            self.linear_num_value_heads % self.linear_num_key_heads != 0,
            "linear_num_value_heads must be a multiple of linear_num_key_heads",
        )
        refuse(self.rotary_dim % 2 != 0 or self.rotary_dim < 2, "the rotary part of head_dim must be even")
        if self.num_experts:
            refuse(
                not 1 <= self.num_experts_per_tok <= self.num_experts,
                f"num_experts_per_tok must lie in 1 … {self.num_experts}",
            )
            refuse(self.moe_intermediate_size < 1, "moe_intermediate_size must be at least 1")
            refuse(self.shared_expert_intermediate_size < 1, "shared_expert_intermediate_size must be at least 1")
        else:
            refuse(self.intermediate_size < 1, "intermediate_size must be at least 1")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def rotary_dim(self) -> int:
        """How many leading components of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_size(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the short convolution mixes: queries, keys and values of a linear layer."""
        return 2 * self.key_size + self.value_size

    @property
    def has_mtp(self) -> bool:
        return self.mtp_num_hidden_layers > 0


def at_least(low: int, name: str, value: object) -> None:
    """Raises ConfigError unless `value` is an integer of at least `low`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


@dataclasses.dataclass(frozen=True)
class Probes:
    """Research switches at the drafter's input, all off by default. Whatever they do to drafts, the output stays the same.

    Attributes:
        shift: pairs every token that the drafter's layer reads with the target's hidden from so many positions further back
            than the right one, on which acceptance must drop.
        fingerprints: hashes each hidden that the target produces and compares it with the one that the drafter's layer is
            fed for that position, bit for bit; completions then say how many differed.
    """

    shift: int = 0
    fingerprints: bool = False

    def __post_init__(self) -> None:
        at_least(0, "shift", self.shift)
        if not isinstance(self.fingerprints, bool):
            raise ConfigError(f"fingerprints must be True or False, got {self.fingerprints!r}")

    def __bool__(self) -> bool:
        return self != Probes()


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a model is run. Every field is static: changing one compiles new executables.

    Attributes:
        dtype: of weights, activations and KV; recurrent state, gates and logits are always float32.
        kv_dtype: "float8_e4m3fn" keeps keys and values in eight bits, the drafter's too: half the memory of bfloat16, and other
            numbers than without, alike for every number of rows. None: as `dtype`.
        slots: sequences that can be live at once; the state holds one more, the sentinel slot 0.
        max_length: tokens a sequence may hold, prompt and answer together.
        max_drafts: the longest draft; `max_rows = max_drafts + 1` rows is the widest verify.
        row_group: rows that pass through a product together, whatever the batch and the draft length are.
            A row's bits depend on this number alone, which is what makes speculative output equal to plain output.
            1, or a multiple of 4: kernels take rows in fours, and a remainder goes another way.
        page_size: tokens of a KV page, and of one step of the attention's reduction.
        kv_pages: pages for running sequences; None for as many as all slots can fill. With fewer, more slots fit into the memory,
            and a sequence is admitted once there are pages for its prompt and the longest answer that it asks for.
        prefill_chunk: tokens of a prefill chunk; chunks end at multiples of it.
        pack_prompts: chunks of several waiting prompts are computed in one dispatch, as many as fit. A chunk then takes a dispatch
            of so many rows by itself too, since a row's bits depend on their number. None: on a GPU, where rows that pad a
            dispatch cost little, if there are several slots.
        rounds_per_dispatch: draft-verify-accept-commit rounds that one dispatch runs.
        prefix_cache: keeps what prefill wrote, so that a prompt which begins like an earlier one goes on from there.
        page_cache_bytes: KV pages kept on the device beyond those that live sequences need; None for three longest sequences a
            slot, up to 1 GiB.
        snapshot_interval: tokens from one snapshot of the recurrent state to the next, a multiple of the page size: chunks end
            there too. None for two chunks.
        snapshot_bytes: snapshots kept on the device; None for up to 1 GiB, where the pages have use for so many.
        host_snapshot_bytes: snapshots kept on the host when the device has no more room.
        drafter_context: which rows of the prompt the drafter sees. "full": all of them, from whichever turn. For comparison, and
            without effect on the output: "prefill_only": those that this request's own prefill computed, as if nothing were
            carried over from earlier turns; "blind": none, only what is generated (the first row is that of the prompt's last
            token, which the first draft is made from).
        refeed: the drafter's rows of accepted drafts are written again with the target's hiddens. False leaves them as speculation
            wrote them, from the drafter's own hiddens, for comparison.
        draft_head: the head that drafts are chosen with: the "exact" one, or an "int4" copy of it (groups of 128 inputs). Drafts
            are verified with the exact one: the output stays the same, and fewer drafts may be right.
        draft_vocabulary: how many token ids, the first ones, drafts are chosen from; None for all. Byte-pair tokenizers number
            tokens by how early they were merged, so that the first are the most frequent; those that end a text come along.
        layout: "layers" keeps one array a layer and weight, "stacked" one array for all layers. XLA's CPU backend copies a
            layer out of a stack at every use, its GPU backend reads it in place.
        tensor_parallel: devices of this process that share the model: each has its part of the heads, of the feed-forward blocks'
            inner features, of the vocabulary and of the state. Numbers that size the state are of all devices together. A row's
            bits depend on how many there are.
        probes: research switches.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 1
    max_length: int = 4096
    max_drafts: int = 7
    row_group: int = 8
    page_size: int = 256
    kv_pages: int | None = None
    prefill_chunk: int = 256
    pack_prompts: bool | None = None
    rounds_per_dispatch: int = 8
    prefix_cache: bool = True
    page_cache_bytes: int | None = None
    snapshot_interval: int | None = None
    snapshot_bytes: int | None = None
    host_snapshot_bytes: int = 0
    drafter_context: Literal["full", "prefill_only", "blind"] = "full"
    refeed: bool = True
    draft_head: Literal["exact", "int4"] = "exact"
    draft_vocabulary: int | None = None
    layout: Literal["layers", "stacked"] = "layers"
    kv_dtype: Literal["float8_e4m3fn"] | None = None
    tensor_parallel: int = 1
    probes: Probes = Probes()

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.kv_dtype not in (None, "float8_e4m3fn"):
            raise ConfigError(f"kv_dtype must be None (as dtype) or float8_e4m3fn, got {self.kv_dtype!r}")
        for name in "slots max_length row_group page_size prefill_chunk rounds_per_dispatch tensor_parallel".split():
            at_least(1, name, getattr(self, name))
        if self.kv_pages is not None:
            at_least(self.pages_per_slot, "kv_pages (a sequence of max_length tokens must fit)", self.kv_pages)
        at_least(0, "max_drafts", self.max_drafts)
        if self.row_group != 1 and (self.row_group < 4 or self.row_group & (self.row_group - 1)):
            # in others, a row's place in its group changes its bits: a product of 12 rows is one of 8 and four of one
            raise ConfigError(f"row_group must be 1 or a power of two from 4 on, got {self.row_group}")
        for name in ("prefix_cache", "refeed"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.pack_prompts, bool | None):
            raise ConfigError(f"pack_prompts must be None, True or False, got {self.pack_prompts!r}")
        for name in ("page_cache_bytes", "snapshot_bytes", "host_snapshot_bytes"):
            if getattr(self, name) is not None:
                at_least(0, name, getattr(self, name))
        if self.snapshot_interval is not None:
            at_least(1, "snapshot_interval", self.snapshot_interval)
            if self.snapshot_interval % self.page_size:
                raise ConfigError(
                    f"snapshot_interval must be a multiple of the page size {self.page_size}, got {self.snapshot_interval}"
                )
        kept = [n for n in ("page_cache_bytes", "snapshot_interval", "snapshot_bytes") if getattr(self, n) is not None]
        kept += ["host_snapshot_bytes"] if self.host_snapshot_bytes else []
        if kept and not self.prefix_cache:
            raise ConfigError(f"{kept[0]} is given, but prefix_cache=False keeps nothing; leave one of them out")
        if self.host_snapshot_bytes and self.snapshot_bytes == 0:
            raise ConfigError("host_snapshot_bytes needs snapshot_bytes: a snapshot is used from the device")
        if self.drafter_context not in DRAFTER_CONTEXTS:
            raise ConfigError(
                f"drafter_context must be {', '.join(DRAFTER_CONTEXTS[:-1])} or {DRAFTER_CONTEXTS[-1]}, "
                f"got {self.drafter_context!r}"
            )
        if self.draft_head not in ("exact", "int4"):
            raise ConfigError(f"draft_head must be exact or int4, got {self.draft_head!r}")
        if self.draft_vocabulary is not None:
            at_least(1, "draft_vocabulary", self.draft_vocabulary)
        if self.layout not in ("layers", "stacked"):
            raise ConfigError(f"layout must be layers or stacked, got {self.layout!r}")
        if not isinstance(self.probes, Probes):
            raise ConfigError(f"probes must be a Probes, as in Probes(shift=1), got {self.probes!r}")

    @property
    def max_rows(self) -> int:
        return self.max_drafts + 1

    @property
    def page_dtype(self) -> str:
        """Of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def feed_rows(self) -> int:
        """Committed rows that may wait for the MTP head: rounds that do without it do not feed it."""
        return max(16, self.max_rows)

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_length // self.page_size)

    @property
    def live_pages(self) -> int:
        """Pages for running sequences."""
        most = self.slots * self.pages_per_slot
        return most if self.kv_pages is None else min(self.kv_pages, most)
