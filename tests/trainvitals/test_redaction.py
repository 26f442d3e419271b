"""Secrets are taken out of what is recorded, and a training's own words are not."""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping

import pytest

from tests.collector.rows import Writer
from trainer_hooks.lifecycle.attributes import flatten_config
from trainvitals.records import (
    ChangeExpected,
    Note,
    RunEnded,
    RunInfo,
    RunStarted,
    decode_events,
)
from trainvitals.redaction import REDACTED, is_secret_name, redact, redact_text
from trainvitals.wire import decode_batch

SECRET_NAMES = """
    api_key apiKey API_KEY WANDB_API_KEY OPENAI_API_KEY wandb.api_key hub_token
    push_to_hub_token use_auth_token HF_TOKEN access_token accessToken refresh-token
    github_token GITLAB_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY aws_session_token
    client_secret clientSecret secretKey password db_password passwd PGPASSWORD smtp_passwd
    passphrase credentials GOOGLE_APPLICATION_CREDENTIALS auth basic_auth cookie cookies
    session_cookie sentry_dsn dsn DSN private_key ssh_key storage_account_key x-api-key
    Authorization jwt
    """

# Names of settings in the configurations of GPT-2, Llama, T5, Whisper, ViT, timm, nanoGPT,
# torchtitan, Lightning, Hydra and Hugging Face's TrainingArguments.
TRAINING_NAMES = """
    tokenizer tokenizer_name tokenizer_path tokenizer_class num_tokens max_tokens min_tokens
    tokens_per_step train_tokens tokens_seen token_dropout token_type_ids use_token_type
    type_vocab_size pad_token eos_token bos_token unk_token sep_token cls_token mask_token
    image_token additional_special_tokens special_tokens pad_token_id eos_token_id
    decoder_start_token_id forced_bos_token_id image_token_index
    include_num_input_tokens_seen class_token register_tokens num_register_tokens dist_token
    end_token start_token stop_token key_dim kv_channels keyboard keys key_padding_mask
    num_key_value_heads qk_norm query_key_norm keypoint_weight image_key text_key label_key
    sort_key monitor_key metric_key attn_key author authors author_name authored_at passes
    num_passes forward_pass bypass compass secretary_head monkey turkey hockey donkey_kong
    credit_weight session_name signature_columns label_smoothing learning_rate
    lr_scheduler_type optimizer.betas model.hidden_size dataset_name hub_strategy
    hub_private_repo hub_model_id push_to_hub ddp_find_unused_parameters data_seed
    """

REAL_VALUES = {
    "eos_token": "<|endoftext|>",
    "pad_token": "[PAD]",
    "bos_token": "<s>",
    "cls_token": "classifier_token",
    "key": "loss",
    "sort_key": "input_length",
    "text_key": "document_text_v2",
    "token": True,
    "hub_token": None,
    "use_auth_token": False,
    "pad_token_id": 50256,
    "model_name_or_path": "meta-llama/Llama-3.2-1B",
    "resume": "s3://bucket/runs/2024-11-03_12-00/step-1000.pt",
    "init_method": "tcp://10.1.2.3:29500",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "repo": "ssh://git@github.com/org/repo.git",
    "note": "basic attention, key and value share weights; tokens: 4096, key: 64",
    "arch": "task-2024-resnet50-sk-lite",
    "prompt": "the secret of good training is patience",
    "job_id": "a3f1c9d2-8b7e-4c55-9f10-aaaaaaaaaaaa",
}

SHAPES = {
    "bearer": "Bearer abcdefghijklmnop1234",
    "header": "Authorization: Basic dXNlcjpodXNo",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "GitHub": "ghp_" + "a1" * 18,
    "GitHub, fine": "github_pat_" + "a1" * 30,
    "GitLab": "glpat-" + "a1" * 10,
    "Hugging Face": "hf_" + "aB3" * 12,
    "OpenAI": "sk-proj-" + "aB3" * 14,
    "Slack": "xoxb-" + "123456789-abcdef",
    "W&B": "wandb_v1_" + "aB3" * 14,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.c2lnbmF0dXJl",
    "Google": "AIza" + "a1" * 17 + "b",
    "URL": "me:hush%21",
    "PEM": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbg==\n-----END OPENSSH PRIVATE KEY-----",
    "PEM, cut": "-----BEGIN PRIVATE KEY-----\nMIIEvQ",
}


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_a_name_of_a_secret_is_known(name: str):
    assert is_secret_name(name)
    assert {name: REDACTED} == flatten_config({name: "hush-hush"})


@pytest.mark.parametrize("name", TRAINING_NAMES.split())
def test_a_name_of_trainings_is_none(name: str):
    assert not is_secret_name(name)
    assert {name: "bert-base-uncased"} == flatten_config({name: "bert-base-uncased"})


def test_real_configurations_stay_as_they_are():
    assert REAL_VALUES == flatten_config(REAL_VALUES)
    assert REAL_VALUES == redact(REAL_VALUES)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_secret_is_known_by_its_shape_wherever_it_stands(kind: str):
    secret = SHAPES[kind]
    core = secret.removeprefix("Bearer ").removeprefix("Authorization: Basic ")
    around = f"postgresql://{secret}@host/db" if kind == "URL" else f"see {secret}"
    for value in (around, [around], {"x": [around]}, (around,), {around}):
        kept = flatten_config({"x": value})
        assert core not in str(kept).encode().decode("unicode_escape"), kept
        assert core not in str(redact(value)), value
        assert REDACTED in str(kept)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python t.py --hub_token hush1 --lr 0.1", "python t.py --hub_token *** --lr 0.1"),
        ("python t.py --api-key=hush --x", "python t.py --api-key=*** --x"),
        ("started with api_key=hush", "started with api_key=***"),
        ("lr=0.1 api_key=0123456789abcdef01", "lr=0.1 api_key=***"),
        ("python t.py --set db.password=hush", "python t.py --set db.password=***"),
        ("WANDB_API_KEY=0123456789ab python t.py", "WANDB_API_KEY=*** python t.py"),
        ('{"api_key": "a b", "pad_token": "[PAD]"}', '{"api_key": "***", "pad_token": "[PAD]"}'),
        ("Namespace(password='hush', lr=1)", "Namespace(password='***', lr=1)"),
        ("https://a.example/b?sv=1&sig=a%2Fb&x=1", "https://a.example/b?sv=1&sig=***&x=1"),
        ("https://me:hush@a.example/b", "https://***@a.example/b"),
        ("num_tokens=100 max_tokens: 4096", "num_tokens=100 max_tokens: 4096"),
        ("the token file is missing", "the token file is missing"),
        ("use_auth_token=True hub_token=None", "use_auth_token=True hub_token=None"),
    ],
)
def test_a_command_line_json_or_repr_is_kept_without_its_secrets(text: str, expected: str):
    assert expected == redact_text(text)
    assert expected == redact_text(redact_text(text))


class Missing(Mapping[str, object]):
    """A mapping as OmegaConf's, of which one value is missing."""

    def __getitem__(self, key: str) -> object:
        if key == "gone":
            raise ValueError("Missing mandatory value")
        return {"api_key": "hush", "lr": 0.1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("api_key", "gone", "lr"))

    def __len__(self) -> int:
        return 3


@dataclasses.dataclass
class Hub:
    """A dataclass with a secret."""

    name: str = "org/model"
    token: str = "hush-1234"


def test_inside_every_container_a_secret_is_found():
    config = {
        "hub": Hub(),
        "arguments": argparse.Namespace(db_password="hush", lr=0.1),
        "omega": Missing(),
        "loggers": [{"wandb": {"api_key": "hush"}}, ("x", Hub())],
        "argv": ["train.py", "--hub-token", "hush-1234", "--lr", "3"],
        "secrets": {"first": "hush", "second": ["hush"]},
        "passwords": ["hush"],
        "pin": {"password": 12345678},
    }
    kept = flatten_config(config)
    assert "hush" not in str(kept)
    assert "12345678" not in str(kept)
    assert (0.1, 0.1, "org/model") == (kept["arguments.lr"], kept["omega.lr"], kept["hub.name"])
    assert "<ValueError>" == kept["omega.gone"]
    assert "'--lr', '3'" in str(kept["argv"])


def test_events_are_recorded_without_secrets_and_others_byte_for_byte():
    url = "https://me:hush@host.example/x"
    info = RunInfo(name="a run", config={"x": f"get {url}"}, tags=(url,))
    recorded = [
        RunStarted(info=info),
        Note(code="n", text=f"cannot reach {url}"),
        RunEnded(state="failed", reason=f"ConnectError: {url}"),
        ChangeExpected(reason="a longer context: key and value heads, 4096 tokens", steps=3),
    ]
    batch = decode_batch(Writer().events(*recorded))
    said = [row.event for row in decode_events(batch.header.stream_schema, batch.rows)]
    assert "hush" not in str(said)
    assert "https://***@host.example/x" in said[2].reason
    assert recorded[3] == said[3]


@pytest.mark.parametrize(
    "piece", ["a", "://", "token=", "a:", "-", "eyJa.", "'", " --key ", "sk-1"]
)
def test_a_long_text_takes_no_long_time(piece: str):
    began = time.process_time()
    redact_text((piece * 200_000)[:200_000])
    # What grows with the square of the length takes minutes.
    assert time.process_time() - began < 30.0


def test_secrets_in_a_list_are_redacted_as_one_alone_is():
    settings = {
        "tokens": ["ghijk12345", "ab"],
        "hosts": {"keys": ("A1b2C3d4E5f6G7h8I9j0K1", "q_proj")},
        "special_tokens": ["endoftext1"],
        "tokens_seen": [1, 2],
        "total_tokens": ["100000000000"],
    }
    expected = {
        **settings,
        "tokens": ["***", "ab"],
        "hosts": {"keys": ("***", "q_proj")},
    }
    assert expected == redact(settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"tokens": ["ghijk12345", "abc"], "lr": 1}', '{"tokens": ["***", "abc"], "lr": 1}'),
        ("tokens=[s3cr3tsecret] keys=[a, b]", "tokens=[***] keys=[a, b]"),
        ("special_tokens: ['endoftext1']", "special_tokens: ['endoftext1']"),
    ],
)
def test_secrets_in_a_list_in_a_text_are_redacted(text, expected):
    assert expected == redact_text(text)
