"""Best-fit decreasing: pieces into as few rows as that takes.

Ding et al. 2024, https://arxiv.org/abs/2404.10830.
"""

import numpy as np


def best_fit_rows(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Row of each piece by best-fit decreasing; int64 [P], rows numbered from 0.

    lengths: int64 [P], 1..capacity. The longest piece goes first, each into the fullest row
    that has room; a bit set of the rooms there are finds it in one step.
    """
    row = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = rows = 0
    for piece, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, place = capacity, rows
            rows += 1
        row[piece] = place
        left = room - length
        if left:
            with_room[left].append(place)
            rooms |= 1 << left
    return row
