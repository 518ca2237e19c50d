"""A stand-in for `Runtime`, so that the command line can be tested without a model."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any


@dataclasses.dataclass
class Nap:
    """Sleeps where a KeyboardInterrupt would be dropped, as in callbacks that JAX gives to the garbage collector."""

    length_s: float

    def __del__(self) -> None:
        time.sleep(self.length_s)


class FakeRuntime:
    """Answers every prompt with the same words; remembers what it was asked."""

    tokenizer: Any = object()
    in_force = "prefix cache off"
    loop = SimpleNamespace(cache=SimpleNamespace(end=lambda lease: None))
    finish_reason = "stop"
    words = ("Hello", ", ", "wörld", "!\x1b[31m")

    def __init__(self, pause_s: float = 0.0, repeat: int = 1) -> None:
        self.pause_s, self.repeat = pause_s, repeat
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    def load(self, model: str, **options: Any) -> "FakeRuntime":
        from atlas_jax.errors import CheckpointError

        if model == "missing":
            raise CheckpointError("no model 'missing'.\nTried a directory missing (not there)")
        self.loaded = model, options
        options["progress"](3, 6)
        options["progress"]("decode rows=4")
        return self

    def check_names(self, options: dict[str, Any]) -> None:
        """Takes them all."""

    def completion(self) -> Any:
        from atlas_jax.metrics import Acceptance, Event, Source

        acceptance = Acceptance.zero(drafts=3)
        acceptance.counts[0, Source.MTP, : Event.ROUNDS, :3] = [2, 2, 1]
        acceptance.counts[0, Source.MTP, Event.ROUNDS] = [0, 2, 0, 0, 1]
        timings = SimpleNamespace(compile_s=1.0, ttft_ms=5.0, tpot_ms=2.0, tokens_per_s=100.0)
        self_dict = dict(token_ids=[1, 2, 3], text="".join(self.words), finish_reason=self.finish_reason)
        return SimpleNamespace(
            **self_dict,
            acceptance=acceptance,
            timings=timings,
            restored=0,
            to_dict=lambda: self_dict | dict(acceptance=acceptance.to_dict(), timings=vars(timings)),
        )

    def stream(self, prompt: Any, **options: Any):
        self.asked.append(([*prompt] if isinstance(prompt, list) else prompt, options))
        for i, word in enumerate(self.words * self.repeat):
            Nap(self.pause_s)
            yield SimpleNamespace(text=word, token_ids=[i], completion=None)
        yield SimpleNamespace(text="", token_ids=[], completion=self.completion())

    def session(self, history: Any = (), **options: Any) -> Any:
        from atlas_jax.session import Session

        real: Any = self
        return Session(real, history, options)

    def turn(self, prompt: Any, options: dict[str, Any], lease: Any):
        return self.stream(prompt, **options)

    def generate(self, prompt: Any, **options: Any) -> Any:
        self.asked.append((prompt, options))
        return self.completion()
