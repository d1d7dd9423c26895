"""What a newcomer meets with a text of his own: sizes that fit, held-out text, clear words."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from lmwright.config.run import Data, Source, Tokenize, Tokenizer
from lmwright.data import missing
from lmwright.data.prepare import prepare
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.tokenizer import load_tokenizer
from tests.data.user_run import command, texts, write_run


@pytest.fixture
def inside(tmp_path, monkeypatch):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(**changes):
    """Replaces lines `name = ...` of run.toml; None takes one out."""
    text = Path("run.toml").read_text()
    for name, value in changes.items():
        line = "" if value is None else f"{name} = {value}\n"
        text, found = re.subn(rf"^{name} = .*\n", line, text, flags=re.M)
        assert found
    Path("run.toml").write_text(text)


def test_the_vocabulary_is_the_models(inside, capsys):
    edit(tokenizer=None)  # which says vocab_size = 300, as the model does
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 0 and "tokenizer: 300 ids" in said and "nothing uses" not in said
    assert load_tokenizer("data/tokenizer").vocab_size == 300


def test_rows_that_no_token_uses_are_said(inside, capsys):
    edit(vocab_size="4096")
    for verb in ("prepare", "train"):
        code, said = command(capsys, verb, "run.toml")
        assert code == 0
        # (4096 - 300) rows of 16, twice where the head is its own; counted by `params`
        found = re.search(r"has 300 ids: (\d+)% of the model's parameters", " ".join(said.split()))
        assert found, said
        assert "or data.tokenizer.vocab_size = 4096 and prepare again" in " ".join(said.split())
    _, said = command(capsys, "params", "run.toml")
    total = int(re.search(r"total\D*([\d,]+)", said)[1].replace(",", ""))
    rows = [3796 * 16 / total, 2 * 3796 * 16 / total]
    assert any(abs(float(found[1]) / 100 - share) < 0.006 for share in rows)


def test_a_text_too_small_for_the_vocabulary_is_said(inside, capsys):
    edit(tokenizer=None, vocab_size="32000")
    code, said = command(capsys, "prepare", "run.toml")
    ids = load_tokenizer("data/tokenizer").vocab_size
    said = " ".join(said.split())
    assert code == 0 and ids < 8192 and f"the tokenizer has {ids:,} ids" in said
    assert "of text suffice for no more ids" in said


def test_a_stores_tokenizer_of_the_earlier_default_stays(inside, capsys):
    """Earlier, 8,192 ids were trained whatever the model; such a store is still up to date."""
    edit(tokenizer="{ vocab_size = 8192 }", vocab_size="9000")
    assert command(capsys, "prepare", "run.toml")[0] == 0
    before = {p: p.stat().st_mtime_ns for p in Path("data").rglob("*.*") if p.is_file()}
    edit(tokenizer=None)
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 0 and "in data: up to date: normalize, tokenizer, tokenize" in said
    assert {p: p.stat().st_mtime_ns for p in Path("data").rglob("*.*") if p.is_file()} == before


def test_a_tokenizer_that_is_too_large_or_not_there_is_refused_before_the_text_is_read(
    inside, capsys
):
    assert command(capsys, "prepare", "run.toml")[0] == 0
    Path("data/tokenizer").rename("big")
    shutil.rmtree("data")
    edit(vocab_size="280", tokenizer='{ path = "big" }')
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 2 and "280 is smaller than the 300 ids of the tokenizer in big" in said
    assert not Path("data").exists()
    edit(tokenizer='{ path = "./gpt2" }')
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 2 and "path: ./gpt2 does not exist" in said and "hf://owner" in said
    assert not Path("data").exists()


def test_a_model_made_smaller_than_the_tokenizer_is_refused_by_prepare(inside, capsys):
    assert command(capsys, "prepare", "run.toml")[0] == 0
    edit(tokenizer='{ path = "data/tokenizer" }')
    assert command(capsys, "prepare", "run.toml", "data.dir=other")[0] == 0
    said = ["data.dir=other", "model.vocab_size=290"]
    code, said = command(capsys, "prepare", "run.toml", *said)
    assert code == 2 and "smaller than the 300 ids" in said


def test_data_stays_as_it_was_where_another_tokenizer_is_too_large(inside, capsys):
    assert command(capsys, "prepare", "run.toml", "data.dir=other")[0] == 0
    edit(vocab_size="280", tokenizer="{ vocab_size = 280 }")
    assert command(capsys, "prepare", "run.toml")[0] == 0
    kept = Path("data/tokenizer/tokenizer.json").read_bytes()
    edit(tokenizer='{ path = "other/tokenizer" }')
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 2 and "smaller than the 300 ids" in said
    assert Path("data/tokenizer/tokenizer.json").read_bytes() == kept


@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_few_documents_hold_out_the_one_of_lowest_hash(dedup, inside, capsys):
    import xxhash

    Path("words.jsonl").unlink()
    documents = texts(12)
    for name, some in (("a", documents[:7]), ("b", documents[7:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in some))
    sources = '[{ path = "a.jsonl" }, { path = "b.jsonl" }]'
    edit(sources=sources, holdout_fraction="0.000001")
    code, said = command(capsys, "prepare", "run.toml", f"data.normalize.dedup={dedup}")
    assert code == 0
    store = TokenStore.open("data")
    assert store.eval_sources == ("a", "b")
    tokenizer = load_tokenizer("data/tokenizer")
    for name, some in (("a", documents[:7]), ("b", documents[7:])):
        lowest = min(some, key=lambda t: xxhash.xxh3_128_digest(t.encode()))
        batch = next(store.eval_batches(name, store.eval_rows(name)))
        ids = batch["tokens"][batch["segment_ids"] > 0].tolist()
        assert tokenizer.decode(ids, skip_special=True) == lowest
    assert re.search(r"^train +a +6 ", said, re.M) and re.search(r"^eval +b +1 ", said, re.M)
    assert command(capsys, "data", "verify", "data")[0] == 0


def test_a_single_document_holds_out_its_end_and_eval_works(inside, capsys):
    text = "\n".join(texts(80))
    Path("book.txt").write_text(text)
    edit(sources='[{ path = "book.txt" }]', holdout_fraction="0.005")
    for verb in ("prepare", "train"):
        assert command(capsys, verb, "run.toml")[0] == 0
    code, said = command(capsys, "eval", "run")
    assert code == 0 and "book" in said
    store = TokenStore.open("data")
    tokenizer = load_tokenizer("data/tokenizer")
    batch = next(store.eval_batches("book", store.eval_rows("book")))
    held = tokenizer.decode(batch["tokens"][batch["segment_ids"] > 0].tolist(), skip_special=True)
    assert text.endswith(held) and 0.05 < len(held) / len(text) < 0.15
    rows = store.batch(0, store.epoch_rows)
    learned = tokenizer.decode(rows["tokens"][rows["segment_ids"] > 0].tolist())
    assert len(learned) < len(text) and held not in learned


def test_prepare_twice_says_up_to_date_and_is_the_same_for_any_workers(inside, capsys):
    edit(holdout_fraction="0.000001")
    assert "up to date" not in command(capsys, "prepare", "run.toml")[1]
    assert "up to date" in command(capsys, "prepare", "run.toml")[1]
    assert command(capsys, "prepare", "run.toml", "data.dir=two", "data.workers=2")[0] == 0
    for path in Path("data").rglob("*.bin"):
        assert path.read_bytes() == Path("two", path.relative_to("data")).read_bytes()


def test_one_conversation_alone_is_not_cut_and_that_is_said(tmp_path, inside, capsys):
    Path("words.jsonl").write_text(json.dumps({"prompt": "a b", "completion": "c d"}) + "\n")
    edit(sources='[{ path = "words.jsonl", rows = "prompt" }]')
    pack = ["data.pack.method=best-fit", "data.chat.template=none", "data.tokenizer.vocab_size=260"]
    code, said = command(capsys, "prepare", "run.toml", *pack)
    assert code == 0, said
    assert "nothing is held out" in " ".join(said.split())


def test_held_out_examples_that_no_row_holds_are_told_as_that(tmp_path, inside, capsys):
    rows = [{"prompt": f"{n} a b", "completion": f"{n} c d" + " e" * 200} for n in range(20)]
    rows += [{"prompt": "a b", "completion": "c d"}]
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    edit(sources='[{ path = "words.jsonl", rows = "prompt" }]')
    pack = ["data.pack.method=best-fit", "data.chat.template=none", "data.tokenizer.vocab_size=260"]
    code, said = command(capsys, "prepare", "run.toml", *pack)
    assert code == 0, said
    assert "chose were left out, as said above; raise it, or data.pack.seq_len" in said


def test_words_for_what_is_not_a_run_or_not_there(inside, capsys):
    Path("x.bin").write_bytes(bytes(range(256)))
    with gzip.open("x", "wb") as f:
        f.write(b"text")
    for name in ("words.jsonl", "x.bin", "x"):
        code, said = command(capsys, "train", name)
        assert code == 2 and f"{name}: is a data file; give a run file" in said
    Path("words.jsonl").rename("away")
    made_of = ["data.dir=elsewhere", "model.seq_len=32"]  # both are needed to prepare it
    code, said = command(capsys, "train", "run.toml", "train.steps=2", *made_of)
    assert code == 2 and f"run `lmwright prepare run.toml {' '.join(made_of)}`" in said
    Path("away").rename("words.jsonl")
    code, said = command(capsys, "prepare", "run.toml", "data.sources.0.path=owner/name")
    assert code == 2 and "is hf://datasets/owner/name" in said
    code, said = command(capsys, "prepare", "run.toml", "data.sources.0.text_column=content")
    assert code == 2 and "no row of words.jsonl has 'content'" in said
    assert "no 'content', only 'text'" in said
    Path("chats.jsonl").write_text(json.dumps({"id": 1, "messages": []}) + "\n")
    code, said = command(capsys, "prepare", "run.toml", "data.sources.0.path=chats.jsonl")
    assert code == 2 and """only 'id', 'messages' (as rows = "messages" has them)""" in said
    assert "change data.sources.text_column or data.sources.rows" in said


def test_equal_rows_are_the_same_data_wherever_they_come_from(inside, capsys):
    """A run goes on after its data were lost, or its texts copied; with other rows it does not."""
    assert command(capsys, "train", "run.toml")[0] == 0
    made = TokenStore.open("data")
    shutil.rmtree("data")
    Path("elsewhere").mkdir()
    shutil.copy("words.jsonl", "elsewhere/words.jsonl")  # of another time, at another place
    moved = "data.sources.0.path=elsewhere/words.jsonl"
    assert command(capsys, "prepare", "run.toml", moved)[0] == 0
    again = TokenStore.open("data")
    assert again.fingerprint == made.fingerprint and again.packed.hash != made.packed.hash
    code, said = command(capsys, "train", "run", "train.steps=3")
    assert code == 0 and "step 3" in said
    # a checkpoint of an earlier version knows its data by the manifest
    earlier = again._digest(again.packed.hash)
    assert again.is_called(earlier) and not made.is_called(earlier)

    lines = Path("words.jsonl").read_text().splitlines()
    shutil.rmtree("data")
    Path("elsewhere/words.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    assert command(capsys, "prepare", "run.toml", moved)[0] == 0
    code, said = command(capsys, "train", "run", "train.steps=4")
    assert code == 2 and "the prepared data is not what run was trained on" in said


def test_train_prepares_what_takes_minutes_and_names_the_command_for_more(
    inside, capsys, monkeypatch
):
    code, said = command(capsys, "train", "run.toml")
    assert code == 0 and "up to date" not in said
    made = TokenStore.open("data").fingerprint
    shutil.rmtree("run")
    assert command(capsys, "prepare", "run.toml")[0] == 0
    assert TokenStore.open("data").fingerprint == made
    code, said = command(capsys, "train", "run.toml")
    assert code == 0 and "up to date" not in said  # found, and left alone

    # what was prepared otherwise is not trained on in silence
    for said_here, field in (
        ("data.holdout_fraction=0.3", "data.holdout_fraction is 0.1 there and 0.3 here"),
        ("data.shuffle.seed=5", "data.shuffle.seed is 0 there and 5 here"),
        ("data.tokenize.append=none", 'data.tokenize.append is "eos" there and "none" here'),
        ("data.sources.0.text_column=body", 'sources.0.text_column is "text" there and "body"'),
        ("data.sources.0.weight=2.0", "data.sources.0.weight is unset there and 2.0 here"),
        ("data.sources.0.min_tokens=9", "data.sources.0.min_tokens is unset there and 9 here"),
        ("data.sources.0.sample_tokens=900", "sources.0.sample_tokens is unset there and 900 here"),
        ("data.sources.0.name=other", 'data.sources is ["words"] there and ["other"] here'),
        ("data.tokenizer.vocab_size=280", "data.tokenizer.vocab_size is 300 there and 280 here"),
        ("data.tokenizer.train=unigram", 'data.tokenizer.train is "bpe" there and "unigram" here'),
    ):
        code, said = command(capsys, "train", "run.toml", "dir=fresh", said_here)
        assert code == 2 and field in said and "run `lmwright prepare run.toml" in said
        assert not Path("fresh").exists()
    unigram = ["data.dir=other", "data.tokenizer.train=unigram"]
    assert command(capsys, "prepare", "run.toml", *unigram)[0] == 0
    path = ["dir=fresh", "data.tokenizer.vocab_size=none", "data.tokenizer.path=other/tokenizer"]
    code, said = command(capsys, "train", "run.toml", *path)
    assert code == 2 and 'data.tokenizer.path is unset there and "other/tokenizer" here' in said
    Path("words.jsonl").write_text(Path("words.jsonl").read_text().replace("a", "b"))  # as large
    code, said = command(capsys, "train", "run.toml", "dir=fresh")
    assert code == 0 and "note: words.jsonl changed since data was prepared" in said
    shutil.rmtree("fresh")
    with open("words.jsonl", "a") as f:
        f.write(json.dumps({"text": "more words"}) + "\n")
    code, said = command(capsys, "train", "run.toml", "train.steps=3")
    assert code == 0 and "changed since" not in said  # it goes on with the data that it has
    code, said = command(capsys, "train", "run.toml", "dir=fresh")
    assert code == 0 and "note: words.jsonl changed since data was prepared" in said

    elsewhere = ["data.dir=elsewhere", "dir=another"]
    monkeypatch.setattr(missing, "BYTES_PER_MINUTE", 10)
    code, said = command(capsys, "train", "run.toml", *elsewhere)
    assert code == 2 and re.search(r"takes up to \d+ minutes; run `lmwright prepare run", said)
    remote = "data.sources.0.path=memory://nowhere/words.jsonl"
    code, said = command(capsys, "train", "run.toml", *elsewhere, remote)
    assert code == 2 and "fetched from elsewhere; run `lmwright prepare run.toml" in said
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    code, said = command(capsys, "train", "run.toml", *elsewhere)
    assert code == 2 and "set all three" in said
    assert not Path("elsewhere").exists() and not Path("another").exists()


def test_a_tokenizer_follows_the_text_where_the_model_is_larger(tmp_path):
    """8,192 ids or one for 64 bytes of text, whatever is more, and never more than the model's."""
    from lmwright.data.tokens.vocabulary import choose_size

    spec = Tokenizer()
    assert choose_size(spec, 32_000, 10_000) == 8192
    assert choose_size(spec, 32_000, 640_000) == 10_000
    assert choose_size(spec, 32_000, 10**9) == 32_000
    assert choose_size(spec, None, 10**9) == 8192
    assert choose_size(Tokenizer(vocab_size=500), 32_000, 10**9) == 500
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    data = Data(dir=str(tmp_path / "data"), sources=(Source(path=str(tmp_path / "a.txt")),))
    assert prepare(data, 16, workers=1).stages["tokenizer"].facts["vocab_size"] < 8192


def test_the_smaller_vocabulary_that_is_named_is_smaller(tmp_path):
    from lmwright.data.tokens.vocabulary import note_unused
    from lmwright.models.llama import Llama

    for size, named in ((320, 270), (4096, 384)):
        model = Llama(
            vocab_size=size, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=8, seq_len=32,
        )  # fmt: skip
        assert f"set model.vocab_size = {named}" in note_unused(model, str(tmp_path), 270)


def test_texts_without_the_token_with_which_a_models_texts_begin(tmp_path):
    """Llama 3's and Gemma's begin with bos, which transformers adds and `prepare` does not."""
    from types import SimpleNamespace

    from lmwright.data.summary import Summary, notes
    from lmwright.data.tokens.tokenizer import begin_with, save_tokenizer, train_tokenizer

    made = train_tokenizer(["some text"] * 9, Tokenizer(vocab_size=280))
    begin_with(made.backend, [made.bos])
    save_tokenizer(made, tmp_path / "tokenizer")
    folder = str(tmp_path / "tokenizer")  # in the mirror of a bucket, or in a portion
    stage = SimpleNamespace(facts={"vocab_size": 280}, folder=folder)
    summary = Summary("gs://bucket/data", {"tokenizer": stage})

    def said(start="base", prepend="none", rows="text"):
        data = Data(
            dir=str(tmp_path), sources=(Source(path="x", rows=rows),),
            tokenize=Tokenize(prepend=prepend),
        )  # fmt: skip
        model = SimpleNamespace(vocab_size=280)
        run = SimpleNamespace(
            model=model, data=data, train=SimpleNamespace(init_from=start), objective=None
        )
        return [note for note in notes(run, summary) if "data.tokenize.prepend" in note]

    assert len(said()) == 1 and repr(made.bos) in said()[0]
    assert not said(start=None) and not said(prepend="bos") and not said(rows="messages")
    assert "has no effect on conversations" in said(prepend="bos", rows="messages")[0]


def test_files_that_came_after_the_data_was_prepared_are_told(inside, capsys):
    """Nothing was said, and they were not trained on."""
    Path("words").mkdir()
    shutil.copy("words.jsonl", "words/a.jsonl")
    Path("words/none.jsonl").touch()
    for path in ("words", "words/*.jsonl"):
        shutil.rmtree("data", ignore_errors=True)
        shutil.rmtree("run", ignore_errors=True)
        Path("words/b.jsonl").unlink(missing_ok=True)
        source = f"data.sources.0.path={path}"
        assert command(capsys, "prepare", "run.toml", source)[0] == 0
        code, said = command(capsys, "train", "run.toml", source, "dir=first")
        assert code == 0 and "since data was prepared" not in said
        shutil.move(shutil.copy2("words.jsonl", "b.jsonl"), "words/b.jsonl")
        code, said = command(capsys, "train", "run.toml", source)
        assert code == 0 and re.search(r"note: \S*words/b.jsonl came since data was prepared", said)
        shutil.rmtree("first")


def test_a_weight_of_a_source_whose_rows_are_all_left_out_says_where_they_went(inside, capsys):
    texts = ["hello there"] * 3 + ["", "another one"]
    Path("few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = "data.sources=[{path='words.jsonl', weight=1.0}, {path='few.jsonl', weight=1.0, MORE}]"
    words = words.replace("MORE", "min_tokens=5000")
    code, said = command(capsys, "prepare", "run.toml", words)
    assert code == 2 and re.search(
        r"'few' has a weight but no rows for training \(of its 5 rows 1 empty, 2 duplicates, "
        r"(1 held out, )?\d shorter than min_tokens or longer than max_tokens\); correct that, or "
        "take the source or its weight out; the sources with rows are words",
        said,
    )
