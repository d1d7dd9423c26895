"""A file whose content has changed, whatever it held before."""


def flipped(content: bytes) -> bytes:
    """`content` with one bit of its last byte flipped: never what it was."""
    return content[:-1] + bytes([content[-1] ^ 1])
