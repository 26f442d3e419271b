"""Removes secrets from recorded data: by the name of a setting, and by the form of a text.

A run's settings, messages and reasons are stored forever and read by many, and users pass access
tokens in all of them. A *name* marks a secret whatever its value is (``api_key``, ``hub_token``);
names of training settings do not (``tokenizer``, ``eos_token``, ``key_dim``). A *shape* marks one
anywhere: prefixes of issuers' tokens, user names and passwords in URLs, private keys. Both are
found in texts, too: in command lines, in JSON, in an object's repr.

It is a safety net, not a proof: a password in a setting called ``x`` stays.
"""

import argparse
import dataclasses
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any, cast

REDACTED = "***"
"""Replacement of a secret."""


def _word_set(names: str) -> frozenset[str]:
    """Return the words by which names of secret settings are recognized."""
    return frozenset(names.split())


_SECRET = _word_set(
    """
    secret secrets password passwords passwd passphrase pwd credential credentials cred
    creds cookie cookies dsn authorization jwt apikey apikeys apitoken authtoken accesstoken
    accesskey privatekey secretkey pgpass dbpass htpasswd
    """
)
"""Parts of a name that mark a secret in any position."""
_ISSUERS = _word_set(
    """
    access account admin anthropic api app application auth aws azure bearer bot client
    comet consumer control csrf deploy deployment encryption gcp gh git github gitlab google
    hf hmac hub hugging face huggingface ingest jupyter license login master mlflow neptune
    npm oauth openai personal private pypi read refresh registry sas secret security service
    session shared signing slack ssh ssl storage subscription tls user wandb webhook write
    """
)
"""Before ``token`` or ``key`` they mark a secret."""
_TRAINING = _word_set(
    """
    additional answer audio begin bos class cls decoder document drop end eos extra fim
    first dist distillation fill forced global image img infill label last mask max mean
    middle min new next no num number pad per prefix prompt query question register sep
    separator space speaker special start stop suffix system tgt think tool unk unknown
    video vision
    """
)
"""Before ``token`` they mark a piece of text."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_RANDOM = re.compile(r"(?=\D*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+=]{20,}\Z")
_ENDINGS = ("password", "passwd", "passphrase")  # PGPASSWORD
_MAX_NAME = 256


def is_secret_name(name: str) -> bool:
    """Return whether a recorded setting of this name holds a secret, whatever its value."""
    name_words = _split_words(name)
    if not _SECRET.isdisjoint(name_words) or any(word.endswith(_ENDINGS) for word in name_words):
        return True
    if not name_words:
        return False
    *before, last = name_words
    if last in ("token", "tokens", "key", "keys"):
        return bool(before) and before[-1] in _ISSUERS
    # ``auth``, but not ``author``; a path such as ``auth_file`` contains no secret.
    return last == "auth" or (last == "pass" and bool(before) and before[-1] in ("db", "user"))


def _split_words(name: str) -> list[str]:
    """Split the name of a setting into lower-case words, to recognize secrets."""
    lower_words = [word.lower() for word in _WORD.findall(name[-_MAX_NAME:])]
    return lower_words[:-1] if lower_words[-2:] == ["key", "id"] else lower_words


def is_secret(name: str, value: object) -> bool:
    """Return whether a recorded setting with this name and value holds a secret.

    None, True, False and the empty text only show whether there is one. Under names that a training
    may use too (``token``, ``key``), only a random-looking text counts.
    """
    if value is None or isinstance(value, bool) or value == "":
        return False
    if is_secret_name(name):
        return True
    name_words = _split_words(name)
    if not isinstance(value, str) or not name_words or name_words[-1] not in ("token", "key"):
        return False
    if name_words == ["token"] or (name_words[-1] == "token" and _TRAINING.isdisjoint(name_words)):
        return re.fullmatch(r"[\w.+/=~-]{8,}", value) is not None
    return _RANDOM.match(value) is not None


_SHAPES = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)",
            r"(?<=://)(?:[^\s/@:'\"]{0,256}:[^\s/@'\"]{1,1024}|[^\s/@:'\"]{16,1024})(?=@)",
            r"(?i:(?<=authorization: )|(?<=authorization=))[^\s'\",]+(?: [^\s'\",]+)?",
            r"(?i:\bbearer)[ ]+(?=\S{0,512}[0-9])[A-Za-z0-9._~+/-]{16,}=*",
            r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web token
            r"\b(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA)[A-Z0-9]{16}\b",  # AWS
            r"\bgh[pousr]_[A-Za-z0-9]{20,}",
            r"\bgithub_pat_\w{20,}",
            r"\bglpat-[\w-]{16,}",  # GitLab
            r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",  # Hugging Face
            r"\bsk-(?=[\w-]{0,64}[0-9])[\w-]{20,}",  # OpenAI, Anthropic
            r"\b[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
            r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
            r"(?<=hooks\.slack\.com/services/)\S+",
            r"(?<=discord\.com/api/webhooks/)\S+",
            r"\bwandb_v[0-9]_\w{20,}|\blocal-[0-9a-f]{40}\b",  # Weights & Biases
            r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}",  # Google
            r"\bnpm_[A-Za-z0-9]{36}|\bpypi-AgE[\w-]{16,}",
            r"\bSG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
        )
    ),
    re.DOTALL,
)
_PAIR = re.compile(
    r"(?P<name>(?<![\w.-])(?P<dash>-{1,2})?[A-Za-z_][\w.-]{0,80})"
    r"(?P<between>['\"]?[ ]*[=:][ ]*|(?(dash)(?<=[\w'\"])['\"]?,?[ ]+|(?!)))"
    r"(?P<value>'[^']*'|\"(?:[^\"\\]|\\.)*\"|[^\s,;&'\"(){}\[\]]+(?:[ ]+[A-Za-z0-9._~+/=-]{16,})?)"
)
"""NAME=VALUE, "NAME": "VALUE", --NAME VALUE, or '--NAME', 'VALUE'; a space alone is not enough."""
_LIST = re.compile(
    r"(?P<begin>(?P<name>(?<![\w.-])[\w.-]{0,80}(?i:tokens|keys))['\"]?[ ]*[=:][ ]*\[)"
    r"(?P<parts>[^\[\]]{0,8192})\]"
)
"""NAME=[VALUE, ...] of names that may be a list of secrets."""
_HINT = re.compile(
    rb"(?i)secret|passw|passphrase|pwd|token|key|cred|auth|cookie|dsn|jwt|pass|sig|bearer|://"
    rb"|-----BEGIN|eyJ|A[KSRIGN][IOPDNV]A|gh[pousr]_|github_pat|glpat|hf_|api_org|sk-|k_live|k_test"
    rb"|xox|services/|webhooks/|wandb_v|local-|AIza|ya29|npm_|pypi-|SG\."
)
"""Substrings of every text with a secret; other texts are not searched further."""


def may_hold_secret(raw: bytes) -> bool:
    """Return whether the text of a record needs a full search for secrets."""
    return _HINT.search(raw) is not None


def redact_text(text: str) -> str:
    """Return the text of a record with ``***`` instead of what looks like a secret."""
    if not may_hold_secret(text.encode("utf-8", "replace")):
        return text
    return _PAIR.sub(
        _redact_pair_match, _LIST.sub(_redact_list_match, _SHAPES.sub(_redact_token_match, text))
    )


def _item_name(name: str) -> str:
    """Return the name of one item of a setting that is a list; "" if it is not secret."""
    return name[:-1] if name.lower().endswith(("tokens", "keys")) else ""


def _is_secret_part(one_of: str, part: object) -> bool:
    """Return whether an item of a setting that lists tokens or keys is a secret."""
    return isinstance(part, str) and not part.isdecimal() and is_secret(one_of, part)


def _redact_list_match(match: re.Match[str]) -> str:
    """Redact the secrets in a list of tokens or keys in a record's text."""
    one_of = _item_name(match["name"])

    def hide(part: re.Match[str]) -> str:
        return REDACTED if _is_secret_part(one_of, part[0]) else part[0]

    return match["begin"] + re.sub(r"[^\s,'\"]+", hide, match["parts"]) + "]"


def _redact_token_match(match: re.Match[str]) -> str:
    """Redact a token in a record's text that its form shows to be secret."""
    return f"Bearer {REDACTED}" if match[0][:6].lower() == "bearer" else REDACTED


def _redact_pair_match(match: re.Match[str]) -> str:
    """Redact the value of a name-value pair in a record's text, if the name is secret."""
    name, between, value = match["name"], match["between"], match["value"]
    quote = value[0] if value[0] in "'\"" else ""
    inner = value[1:-1] if quote else value
    is_word = inner.lower() in ("none", "null", "true", "false", "")
    is_signature = name.lower().rpartition("-")[2] in ("sig", "signature") and "=" in between
    is_hidden = is_signature or is_secret(name, inner)
    if is_word or inner == REDACTED or not is_hidden:
        # The matched value may contain the next pair: --set password=..., lr=1 password=...
        is_one_word = any(sign in between for sign in "=:") and (quote or " " not in value)
        return match[0] if is_one_word else name + between + _PAIR.sub(_redact_pair_match, value)
    return f"{name}{between}{quote}{REDACTED}{quote}"


# ----------------------------------------------------------------------------- inside containers

_MAX_DEPTH = 8
_MAX_ITEMS = 1_000
_MAX_TEXT = 8_192
_NO_LISTS = (bytes, bytearray, memoryview, range)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*\Z")


def fields_of(value: object) -> Iterator[tuple[str, object]] | None:
    """Return names and values of settings: a mapping, dataclass or Namespace; otherwise None.

    If reading a value fails, such as a missing one of OmegaConf, the error's name is used.
    """
    if isinstance(value, Mapping):
        return ((str(key), _safe_get(value.__getitem__, key)) for key in _safe_keys(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return ((name, _safe_get(value.__getattribute__, name)) for name in names)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return iter(vars(value).items())
    return None


def _safe_keys(value: Mapping[object, object]) -> list[object]:
    """Return the keys of a third-party mapping of settings; none if reading them fails."""
    try:
        return list(value)
    except Exception:  # noqa: BLE001 - a stranger's mapping may raise anything
        return []


def _safe_get(get: Callable[[Any], object], key: object) -> object:
    """Read one value of third-party settings; the error's name if that fails."""
    try:
        return get(key)
    except Exception as error:  # noqa: BLE001 - as above
        return f"<{type(error).__name__}>"


def redact(value: object) -> object:
    """Return settings or other records as plain containers without secrets.

    In a command line, a list of words, the value after ``--NAME`` of a secret is removed. Items
    that are nested too deeply, or beyond 1,000 in all, become ``...``.
    """
    return _ContainerRedactor().redact(value, 0)


class _ContainerRedactor:
    """One traversal of containers, which may contain each other, or one of them many times."""

    def __init__(self) -> None:
        self._num_left = _MAX_ITEMS

    def redact(self, value: object, depth: int, one_of: str = "") -> object:
        """Redact settings in nested containers; ``one_of`` names the items of a secret list."""
        if isinstance(value, str):
            return redact_text(value[:_MAX_TEXT])
        self._num_left -= 1
        fields = fields_of(value)
        is_list = isinstance(value, Sequence | Set) and not isinstance(value, _NO_LISTS)
        if fields is None and not is_list:
            return value
        if depth >= _MAX_DEPTH or self._num_left <= 0:
            return "..."
        if fields is not None:
            redacted: dict[str, object] = {}
            for name, part in fields:
                if self._num_left <= 0:
                    break
                hidden = is_secret(name, part)
                redacted[name] = (
                    REDACTED if hidden else self.redact(part, depth + 1, _item_name(name))
                )
            return redacted
        listed = list(islice(cast("Iterable[object]", value), self._num_left))
        if one_of:
            listed = [REDACTED if _is_secret_part(one_of, part) else part for part in listed]
        parts = self._redact_list(listed, depth)
        if isinstance(value, tuple):
            return tuple(parts)
        return set(parts) if isinstance(value, Set) else parts

    def _redact_list(self, values: list[object], depth: int) -> list[object]:
        """Redact a list of a record, such as a command line with an option for a secret."""
        parts: list[object] = []
        option = ""
        for value in values:
            is_word = isinstance(value, str)
            hidden = bool(option) and is_word and is_secret(option, value)
            parts.append(REDACTED if hidden else self.redact(value, depth + 1))
            option = str(value) if is_word and _OPTION.match(str(value)) else ""
        return parts
