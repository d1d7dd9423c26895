"""Handshake: an agent and its leader prove to each other that they know the job's token.

    agent --hello, nonce--> leader --nonce, proof--> agent --proof--> leader

The token itself is never sent: whoever listens on the leader's port in its place learns nothing and
is not obeyed. A proof is the HMAC of the role, the host and both random nonces, so that none can be
used a second time. What is said afterwards is not encrypted.
"""

import hmac
import json
import secrets
from asyncio import StreamReader, StreamWriter
from typing import Any


async def introduce(reader: StreamReader, writer: StreamWriter, token: str, host: int) -> None:
    """Introduces the agent of a host. Raises ConnectionError where its leader does not answer."""
    own = secrets.token_hex(16)
    _say(writer, hello=host, nonce=own)
    answer = json.loads(await reader.readline())
    nonces = f"{own} {answer['nonce']}"
    if not _same(answer["proof"], _proof(token, "leader", host, nonces)):
        raise ConnectionError("what listens on the leader's port does not know the job's token")
    _say(writer, proof=_proof(token, "agent", host, nonces))


async def admit(reader: StreamReader, writer: StreamWriter, token: str) -> int:
    """The host whose agent is at the other end. Raises ConnectionError for a stranger."""
    hello, own = json.loads(await reader.readline()), secrets.token_hex(16)
    host, nonces = int(hello["hello"]), f"{hello['nonce']} {own}"
    _say(writer, nonce=own, proof=_proof(token, "leader", host, nonces))
    answer = json.loads(await reader.readline())
    if not _same(answer["proof"], _proof(token, "agent", host, nonces)):
        raise ConnectionError("a stranger")
    return host


def _say(writer: StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def _proof(token: str, role: str, host: int, nonces: str) -> str:
    return hmac.digest(token.encode(), f"{role} {host} {nonces}".encode(), "sha256").hex()


def _same(proof: object, expected: str) -> bool:
    return hmac.compare_digest(str(proof).encode(), expected.encode())
