"""TRL's trainers with tiny models made from a config, watched through the Hugging Face callback."""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

_WORDS = ("<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(12)))
_NUM_ROWS = 96
_PROMPTS = [f"w{n % 12} w{(n + 1) % 12}" for n in range(_NUM_ROWS)]
_CHOSEN = [f" w{(n + 2) % 12} w{(n + 3) % 12}" for n in range(_NUM_ROWS)]
_REJECTED = [f" w{(n + 5) % 12} w{(n + 3) % 12}" for n in range(_NUM_ROWS)]
_PAIRS = [*zip(_CHOSEN, _REJECTED, strict=True)]
_TEXTS = [prompt + chosen for prompt, chosen in zip(_PROMPTS, _CHOSEN, strict=True)]
_GROUP, _LENGTH = 8, 8

Data = Literal["texts", "completions", "ids", "pairs", "marked", "prompts"]
Reward = Literal["", "first", "share", "noise"]


@dataclass(frozen=True, kw_only=True)
class TrlRun:
    """A training with one of TRL's trainers."""

    trainer: str
    """Name of the trainer's class without ``Trainer``."""
    data: Data
    reward: Reward = ""
    """What is rewarded: the first word, the share of three words, or nothing."""
    learning_rate: float = 3e-3
    rate_factor: float = 1.0
    """Factor of the learning rate from the onset on."""
    breaks: bool = False
    """Whether the reward is 0 from the onset on."""
    lora: Literal["", "trained", "frozen", "thawed"] = ""
    """LoRA adapters: trained, not trained, or trained together with the base weights."""
    more: dict[str, object] = field(default_factory=dict)
    """Further arguments of the trainer's config."""


def is_installed() -> bool:
    """Return whether TRL and what its trainings need can be imported."""
    return all(importlib.util.find_spec(name) for name in ("trl", "peft", "transformers"))


def train(run: TrlRun, seed: int, steps: int, onset: int, read: Callable[[str], object]) -> None:
    """Train once; ``read`` is called with the run's id every few steps, and at the end."""
    import trl
    from datasets import Dataset
    from transformers import set_seed

    from trainer_hooks.integrations.huggingface import VitalsCallback

    set_seed(seed)
    # Its modules come from several versions of TRL, so its types are not checked.
    library: Any = trl
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(library, f"{run.trainer}Config")(
            output_dir=str(Path(folder, "out")), max_steps=steps, logging_steps=1, seed=seed,
            learning_rate=run.learning_rate, lr_scheduler_type="constant", max_grad_norm=1.0,
            per_device_train_batch_size=16, save_strategy="no", report_to=[], use_cpu=True,
            bf16=False, disable_tqdm=True, gradient_checkpointing=False,
            **_sampling(run), **run.more,
        )  # fmt: skip
        trainer = getattr(library, f"{run.trainer}Trainer")(
            model=_model(run, Path(folder, "model")), args=config,
            train_dataset=Dataset.from_dict(_rows(run.data)), processing_class=_tokenizer(),
            callbacks=[_rate_callback(run, onset)],
            **({"reward_funcs": _reward(run, seed, onset)} if run.reward else {}),
            **({"peft_config": _adapters()} if run.lora else {}),
        )  # fmt: skip
        if run.lora == "frozen":
            for name, parameter in trainer.model.named_parameters():
                parameter.requires_grad_("lora_" not in name and "lm_head" in name)
        elif run.lora == "thawed":
            trainer.model.requires_grad_(True)
        callback = VitalsCallback(trainer)
        trainer.add_callback(callback)
        trainer.add_callback(_reading_callback(callback, read))
        trainer.train()


def _sampling(run: TrlRun) -> dict[str, object]:
    """Return the arguments of a trainer that samples, or of one that reads rows."""
    if run.reward:
        return {"num_generations": _GROUP, "max_completion_length": _LENGTH, "beta": 0.04}
    return {"max_length": 16}


def _rows(data: Data) -> dict[str, Sequence[object]]:
    """Return the columns of the dataset."""
    columns: dict[Data, dict[str, Sequence[object]]] = {
        "texts": {"text": _TEXTS},
        "completions": {"prompt": _PROMPTS, "completion": _CHOSEN},
        "ids": {"input_ids": [[4, 5 + n % 9, 6][: 2 + n % 2] for n in range(_NUM_ROWS)]},
        # As with people's preferences, one answer in four is the other way round.
        "pairs": {
            "prompt": _PROMPTS,
            "chosen": [(c, r)[n // 12 % 4 == 0] for n, (c, r) in enumerate(_PAIRS)],
            "rejected": [(r, c)[n // 12 % 4 == 0] for n, (c, r) in enumerate(_PAIRS)],
        },
        # The rejected ones differ in a mark that the chosen ones never have.
        "marked": {
            "prompt": _PROMPTS,
            "chosen": _CHOSEN,
            "rejected": [" w0 w0 w0 w0"] * _NUM_ROWS,
        },
        "prompts": {"prompt": _PROMPTS},
    }
    return columns[data]


def _reward(run: TrlRun, seed: int, onset: int) -> Callable[..., list[float]]:
    """Return the reward function; it is called once per step."""
    numbers, num_calls = random.Random(seed), 0

    def reward(completions: Sequence[str], **_: object) -> list[float]:
        nonlocal num_calls
        num_calls += 1
        if run.breaks and num_calls > onset:
            return [0.0] * len(completions)
        if run.reward == "noise":
            return [numbers.gauss(0.0, 1.0) for _ in completions]
        answers = [text.split() for text in completions]
        if run.reward == "first":
            return [float(each[:1] == ["w3"]) for each in answers]
        return [sum(w in ("w3", "w4", "w5") for w in each) / max(len(each), 1) for each in answers]

    return reward


def _rate_callback(run: TrlRun, onset: int) -> Any:
    """Return a callback that changes the learning rate at the onset."""
    from transformers import TrainerCallback

    class ChangedRate(TrainerCallback):
        """Multiplies the rate of every group."""

        def on_step_begin(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
        ) -> None:
            """Set the rate before the step's update."""
            if state.global_step >= onset and run.rate_factor != 1.0:
                for group in optimizer.param_groups:
                    group["lr"] = run.learning_rate * run.rate_factor

    return ChangedRate()


def _reading_callback(callback: Any, read: Callable[[str], object]) -> Any:
    """Return a callback that reads the journal, which is bounded."""
    from transformers import TrainerCallback

    class Reading(TrainerCallback):
        """Reads every 50th step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Read what is new."""
            if state.global_step % 50 == 1:
                read(callback.attached.run_id)

    return Reading()


def _adapters() -> Any:
    """Return LoRA adapters of the attention."""
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def _tokenizer() -> Any:
    """Return a tokenizer of 16 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(_WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip


def _model(run: TrlRun, folder: Path) -> Any:
    """Return a tiny model that knows where it was loaded from: TRL loads its reference there."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    config = LlamaConfig(
        vocab_size=len(_WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, num_labels=1,
    )  # fmt: skip
    kind: Any = LlamaForSequenceClassification if run.trainer == "Reward" else LlamaForCausalLM
    torch.set_num_threads(1)
    kind(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return kind.from_pretrained(folder)
