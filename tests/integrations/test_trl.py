"""TRL's trainers of each kind with tiny models: exact skips, and the scalars that are judged.

Models and tokenizers are made here, nothing is downloaded. TRL up to 1.12 has PPO.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="not installed: transformers")
pytest.importorskip("trl", reason="not installed: trl")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("own_place")]

import trl  # noqa: E402

try:
    from trl.experimental import ppo
except ImportError:
    ppo = None
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

from tests.support.watched import own_place  # noqa: E402, F401
from tests.trainer_hooks.measures.journal import Journal  # noqa: E402
from trainer_hooks.integrations.huggingface import VitalsCallback  # noqa: E402
from trainvitals.detect.posttraining.names import read_quantities  # noqa: E402
from trainvitals.errors import UsageError  # noqa: E402
from trainvitals.records import DecisionMade, RunStarted  # noqa: E402

WORDS = ("<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(12)))
STEPS, BAD = 8, 4
PROMPTS = [f"w{n % 12} w{(n + 1) % 12}" for n in range(32)]
CHOSEN = [f" w{(n + 2) % 12} w{(n + 3) % 12}" for n in range(32)]
REJECTED = [f" w{(n + 5) % 12} w{(n + 3) % 12}" for n in range(32)]
PAIRS = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
TEXTS = {"text": [a + b for a, b in zip(PROMPTS, CHOSEN, strict=True)]}
SAMPLED = {"num_generations": 4, "max_completion_length": 6, "beta": 0.04}
RATED = {"prompt": PROMPTS, "completion": CHOSEN, "label": [n % 2 == 0 for n in range(32)]}
COMPLETED = {"prompt": PROMPTS, "completion": CHOSEN}
TASKS = {
    "sft": ("SFT", TEXTS, {"max_length": 16}, {"loss", "epoch", "padding_labels", "end_labels"}),
    "dpo": ("DPO", PAIRS, {"max_length": 16}, {"chosen_logp", "rejected_logp", "accuracy"}),
    "kto": ("KTO", RATED, {"max_length": 16}, {"chosen_logp", "rejected_logp", "margin"}),
    "reward_model": ("Reward", PAIRS, {"max_length": 16}, {"accuracy", "margin"}),
    "grpo": ("GRPO", {"prompt": PROMPTS}, SAMPLED, {"reward", "entropy", "kl", "dead_share"}),
    "rloo": ("RLOO", {"prompt": PROMPTS}, SAMPLED, {"reward", "entropy", "kl", "dead_share"}),
}
"""Trainer, data, arguments and quantities that it logs."""
NAMES = ("activation_checkpointing", "gradient_checkpointing")
RECOMPUTES = next(name for name in NAMES if hasattr(trl.SFTConfig, name))
if ppo is not None:
    IDS = {"input_ids": [[4 + n % 12, 4 + (n + 1) % 12] for n in range(32)]}
    ONE_UPDATE = {"num_ppo_epochs": 1, "num_mini_batches": 1, "total_episodes": 4 * STEPS}
    GIVEN = {**ONE_UPDATE, "response_length": 6, "num_sample_generations": 0}
    TASKS["ppo"] = ("PPO", IDS, GIVEN, {"reward", "entropy", "kl_of_sequence", "ratio"})


class Seen(TrainerCallback):
    """Keeps the parameters after each step, and spoils the gradient of an update.

    If it is not guarded, it leaves that update out: this is what an exact skip does.
    """

    def __init__(self, bad: int | None, *, guarded: bool) -> None:
        self.bad, self.is_guarded, self.parameters, self.logs = bad, guarded, [], []
        self.num_updates = 0

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        # PPO's trainer has no callback at the start of a step.
        parameter = next(p for p in model.parameters() if p.requires_grad)
        parameter.register_hook(self.spoil)
        if not self.is_guarded:
            self.update, optimizer.step = optimizer.step, self.leave_out

    def spoil(self, gradient):
        self.num_updates += 1
        is_bad = self.is_guarded and self.num_updates - 1 == self.bad
        return gradient * float("nan") if is_bad else gradient

    def leave_out(self, *args, **kwargs):
        return None if self.num_updates - 1 == self.bad else self.update(*args, **kwargs)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.parameters.append([p.detach().clone() for p in model.parameters()])

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def model(task: str, folder: Path):
    """Return a model that knows where it was loaded from: TRL loads its reference from there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
    )
    kind = LlamaForSequenceClassification if task in JUDGES else LlamaForCausalLM
    kind(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return kind.from_pretrained(folder)


JUDGES = ("reward_model", "value_model")


def models_of_ppo(folder: Path) -> dict:
    return {
        "ref_model": None,
        **{name: model(name, folder / name) for name in JUDGES},
    }


def count(completions, **_) -> list[float]:
    return [float(text.count("w3")) for text in completions]


def trained(
    task: str,
    folder,
    *,
    bad: int | None = None,
    guard: bool = True,
    knows: bool = True,
    mode: str = "guard",
    data=None,
    thaw: bool = False,
    **more,
) -> Seen:
    name, default_data, arguments, _ = TASKS[task]
    seen, peft_config = Seen(bad, guarded=guard), more.pop("peft_config", None)
    arguments = {**arguments, **more}
    library = ppo if task == "ppo" else trl
    trainer = getattr(library, f"{name}Trainer")(
        model=model(task, folder / "model"),
        args=getattr(library, f"{name}Config")(
            output_dir=str(folder / "out"),
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=0.01,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            **{RECOMPUTES: False},
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Dataset.from_dict(data or default_data),
        processing_class=tokenizer(),
        callbacks=[seen],
        **({"reward_funcs": count} if "num_generations" in arguments else {}),
        **(models_of_ppo(folder) if task == "ppo" else {}),
        **({} if peft_config is None else {"peft_config": peft_config}),
    )
    if thaw:
        trainer.model.requires_grad_(True)
    if guard:
        trainer.add_callback(VitalsCallback(trainer if knows else None, mode=mode))
    set_seed(0)  # PPO's trainer does not set NumPy's
    trainer.train()
    return seen


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("task", TASKS)
def test_a_training_is_the_one_without_us_that_leaves_the_skipped_step_out(tmp_path, task):
    bare = trained(task, tmp_path, bad=BAD, guard=False)
    guarded = trained(task, tmp_path, bad=BAD)
    assert STEPS == len(guarded.parameters)
    assert all(map(same, bare.parameters, guarded.parameters))
    steps = zip(guarded.parameters, guarded.parameters[1:], strict=False)
    assert [BAD] == [number for number, (one, other) in enumerate(steps, 1) if same(one, other)]
    (started,) = [e for e in Journal(tmp_path / "shm").events if isinstance(e, RunStarted)]
    assert task == started.info.task
    assert TASKS[task][3] <= quantities_in(tmp_path).keys()


@pytest.mark.skipif(ppo is None, reason="TRL from 1.13 on has no PPO")
@pytest.mark.parametrize("bad", [None, 9, 14])
def test_one_of_several_updates_in_a_step_of_ppo_is_skipped_alone(tmp_path, bad):
    several = {"num_ppo_epochs": 2, "num_mini_batches": 2}
    bare = trained("ppo", tmp_path, bad=bad, guard=False, **several)
    guarded = trained("ppo", tmp_path, bad=bad, **several)
    assert (STEPS, 4 * STEPS) == (len(guarded.parameters), guarded.num_updates)
    assert all(map(same, bare.parameters, guarded.parameters))
    made = [e.decision for e in Journal(tmp_path / "shm").events if isinstance(e, DecisionMade)]
    expected = [] if bad is None else [("skip_step", bad)]
    assert expected == [(decision.action, decision.step) for decision in made]


@pytest.mark.skipif(ppo is None, reason="TRL from 1.13 on has no PPO")
@pytest.mark.parametrize(
    ("knows", "mode", "words"),
    [(True, "heal", "several updates in a step"), (False, "guard", "does not know its trainer")],
)
def test_what_the_loop_of_ppo_cannot_have_is_refused(tmp_path, knows, mode, words):
    with pytest.raises(UsageError, match=words):
        trained("ppo", tmp_path, knows=knows, mode=mode)


def quantities_in(folder) -> dict[str, float]:
    """Return the quantities that detectors get, with their latest values."""
    scalars = Journal(folder / "shm").scalars()
    return read_quantities({name: value for _, name, value in scalars})


def counts_in(folder) -> dict[str, float]:
    """Return the counts of labels and adapters."""
    quantities = quantities_in(folder)
    return {name: quantities[name] for name in quantities if name.endswith(COUNTED)}


COUNTED = ("_labels", "_optimizer", "_gradient")


def test_labels_of_a_healthy_fine_tuning_are_counted(tmp_path):
    trained("sft", tmp_path)
    assert {"padding_labels": 0.0, "end_labels": 1.0} == counts_in(tmp_path)


def test_labels_of_prompts_are_counted_from_the_dataset(tmp_path):
    trained("sft", tmp_path, data=COMPLETED, completion_only_loss=False)
    assert 1.0 == counts_in(tmp_path)["prompt_labels"]


def test_masked_prompts_are_no_finding(tmp_path):
    trained("sft", tmp_path, data=COMPLETED)
    assert {"padding_labels": 0.0, "end_labels": 1.0} == counts_in(tmp_path)


def test_rows_without_an_end_are_counted(tmp_path):
    trained(
        "sft", tmp_path, data={"input_ids": [[4, 5 + n % 9, 6][: 2 + n % 2] for n in range(32)]}
    )
    assert 0.0 == counts_in(tmp_path)["end_labels"]


@pytest.mark.parametrize(("thaw", "share"), [(False, 0.0), (True, 1.0)])
def test_adapters_of_peft_and_a_base_that_was_unfrozen(tmp_path, thaw, share):
    peft = pytest.importorskip("peft", reason="not installed: peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trained("sft", tmp_path, peft_config=config, thaw=thaw)
    counts = counts_in(tmp_path)
    assert (1.0, 1.0) == (counts["adapters_in_optimizer"], counts["adapters_with_gradient"])
    assert share == counts["base_in_optimizer"]
