"""Removes credentials from URLs in everything that is stored or printed.

    https://me:pw@host/x.jsonl?version=3&X-Amz-Signature=ab12
    redact_text      https://***@host/x.jsonl?version=3&***     messages, run files, trackers
    without_secrets  https://host/x.jsonl?version=3          fingerprints; a new token is no change

A part of a query is a secret by its name, as signed URLs of S3, Google, Azure and others and
common services call theirs, or where its value looks like a key.
"""

import re
from urllib.parse import unquote

MARK = "***"

# hf://datasets/owner/name@revision has no user
_USER = re.compile(r"(?<!\bhf)://[^/\s?#\"'<>]+@")
_QUERY = re.compile(r"(://[^\s?#\"'<>]*)([?#][^\s\"'<>]*)")
_SECRET_NAME = re.compile(
    r"^(xamz|xgoog|xoss|xms|xcos|qsign|qak|hdnt|hdnea)"
    r"|secret|passw|pwd|credential|apikey|accesskey|accessid|signature|cookie|jwt|hmac|bearer"
    r"|session|sig$|token(?!i[sz])|auth(?!or(?!iz))"
    r"|^(key|keyid|keypairid|policy|sign|expires|expiry|pass|user|username)$"
)
# The parts of an Azure SAS beside `sig`; their names alone say nothing.
_SAS = frozenset(
    "sv ss srt sr sp se st spr sip si skoid sktid skt ske sks skv sdd saoid suoid scid ses".split()
)
_KEY_VALUE = re.compile(
    r"eyJ[\w-]+\.|(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=(?:\D*\d){3})[A-Za-z0-9+/%]{32}"
)


def redact_text(text: str) -> str:
    """Text with `***` for user, password, signature and tokens in its URLs."""
    return _clean(text, f"{MARK}@", MARK)


def without_secrets(text: str) -> str:
    """Text whose URLs have no user info, signature or token; other URLs are unchanged."""
    return _clean(text, "", "")


def has_secrets(text: str) -> bool:
    """True if a URL in the text contains credentials."""
    return without_secrets(text) != text


def was_redacted(url: str) -> bool:
    """True if credentials were removed from a URL, so that it cannot be read without them."""
    return f"://{MARK}@" in url or re.search(r"[?&#]\*\*\*($|&)", url) is not None


def _clean(text: str, user: str, mark: str) -> str:
    if "://" not in text:
        return text
    text = _USER.sub(f"://{user}", text)
    return _QUERY.sub(lambda match: match[1] + _clean_query(match[2], mark), text)


def _clean_query(query: str, mark: str) -> str:
    """Query and fragment of a URL (from its `?` or `#`) without secrets."""
    parts = re.split(r"([?&;#])", query)[1:]
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    names = {_name(part) for _, part in pairs}
    public = [(sep, part) for sep, part in pairs if not _is_secret(part, "sig" in names)]
    if len(public) == len(pairs):
        return query
    public += [("&", mark)] if mark else []
    return "".join((query[0] if i == 0 else sep) + part for i, (sep, part) in enumerate(public))


def _is_secret(part: str, shared_access: bool) -> bool:
    name, _, value = part.partition("=")
    name = _name(part)
    if part == MARK or (shared_access and name in _SAS):
        return True
    return bool(value) and bool(_SECRET_NAME.search(name) or _KEY_VALUE.match(unquote(value)))


def _name(part: str) -> str:
    return re.sub(r"[^a-z0-9]", "", unquote(part.partition("=")[0]).lower())
