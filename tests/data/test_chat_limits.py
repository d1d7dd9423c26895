"""Chat templates of strangers end in one sentence, whatever they ask for."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from lmwright.config.run import Chat, Data, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.text import chat_child
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_template import ChatTemplate
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import CHATS, chat_tokenizer

ANSWER = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
LOOPS = "{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
BOMBS = {
    "loops": LOOPS,
    "doubling": "{% set n = namespace(t='a') %}{% for i in range(60) %}"
    "{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "joining": "{% set n = namespace(t='a') %}{% for i in range(60) %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "replace": "{% set n = namespace(t='aaaaaaaa') %}{% for i in range(9) %}"
    "{% set n.t = n.t.replace('a', 'aaaaaaaa' * 9) %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "parentheses": "{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}",
    "blocks": "{% if 1 %}" * 9999 + "{% endif %}" * 9999,
    "long text": "{% for i in range(9999) %}" + "x" * 999 + "{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def quick(monkeypatch):
    """Half a second instead of the usual limit."""
    monkeypatch.setattr(chat_child, "CPU_SECONDS", 0.5)
    chat_child.CHILD.close()
    yield
    chat_child.CHILD.close()


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_never_ends_is_one_sentence(name, tmp_path, tokenizer, quick):
    (tmp_path / "t.jinja").write_text(ANSWER + BOMBS[name])
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    data = Data(
        dir=str(tmp_path / "data"),
        sources=(Source(path=str(tmp_path / "a.jsonl"), rows="prompt"),),
        tokenizer=Tokenizer(path=str(tmp_path / "tokenizer")),
        chat=Chat(template=str(tmp_path / "t.jinja")),
        pack=Pack(method="best-fit"),
    )
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(UserError, match=r"^data\.chat\.template: .*choose another$"):
        prepare(data, 64, workers=1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert not (tmp_path / "data").exists()
    assert after.ru_utime - before.ru_utime < 2
    assert after.ru_maxrss - before.ru_maxrss < 200 << 10  # KiB


def test_a_conversation_that_takes_too_much_is_a_bad_row_and_the_next_is_rendered(tokenizer, quick):
    source = "{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endif %}" + ANSWER
    template = ChatTemplate(source, tokenizer)
    bomb = {"messages": [{"role": "user", "content": "bomb"}, CHATS["one"][1]]}
    for _ in range(2):
        with pytest.raises(UnusableError, match="takes more than"):
            template.turns(bomb)
        assert template.turns({"messages": CHATS["one"]}).text.endswith("It is 42.<|im_end|>")
    with pytest.raises(UserError, match="repeatedly"):
        template.turns(bomb)


OWNER = """
import signal, sys
from lmwright.data.text.chat_child import CHILD
%s
print(open(f"/proc/{CHILD._running().pid}/status").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "nowhere",
    [
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})",
    ],
)
def test_the_limit_holds_where_the_signal_of_its_clock_goes_nowhere(nowhere):
    """As in processes that have loaded libtpu; a new process has that from its owner."""
    said = subprocess.run(
        [sys.executable, "-c", OWNER % nowhere], capture_output=True, text=True, check=True
    ).stdout
    for name in ("SigIgn", "SigBlk"):
        bits = int(re.search(rf"{name}:\s*(\w+)", said)[1], 16)
        assert not bits >> (signal.SIGPROF - 1) & 1


def test_the_process_is_started_again_and_ends_with_its_owner(tokenizer):
    template = ChatTemplate(ANSWER, tokenizer)
    wanted = template.render({"messages": CHATS["one"]})
    first = chat_child.CHILD._process.pid
    os.kill(first, signal.SIGKILL)
    with suppress(UnusableError):  # where it is not seen to be gone before it is asked
        assert template.render({"messages": CHATS["one"]}) == wanted
    assert template.render({"messages": CHATS["one"]}) == wanted
    running = chat_child.CHILD._process
    chat_child.CHILD._owner = 0  # as after a fork: that child is the other process's
    assert template.render({"messages": CHATS["one"]}) == wanted
    assert chat_child.CHILD._process.pid != running.pid and running.poll() is None
    running.stdin.close()  # as when this process is killed
    end = time.monotonic() + 20
    while running.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert running.poll() == 0
    chat_child.CHILD.close()


def test_text_of_every_kind_comes_back_as_it_went(tokenizer):
    text = "\0\x1b\ud800\ue000 \U0001f600\u2028\r\n" + "\u00fc" * 100_000
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    found = ChatTemplate("{{ messages[1].content }}", tokenizer).turns({"messages": chat})
    assert found.text == text and found.turns == ((0, len(text)),)
